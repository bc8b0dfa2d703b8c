"""Reader for Langfuse exports in JSON or JSON lines: observations, traces with observations, and scores.

A trace's generations, in chronological order, become the calls of one attempt. Names are camelCase in the API and UI,
snake_case in blob storage exports. Input and output may be JSON strings. There are no tokens.
"""

import json
from collections.abc import Iterator
from typing import Any

from art_cli.formats.imported_attempt import (
    TracedAttempt,
    TracedCall,
    TraceReader,
    as_list,
    as_number,
    as_object,
    named,
    sampling_of,
    seconds,
)
from art_cli.runs.trajectory import Json

KINDS = {"GENERATION", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL", "SPAN", "EVENT"}
GROUPS = ("scenario_id", "group_id", "task_id", "dataset_item_id", "datasetItemId")


class LangfuseExport(TraceReader):
    name = "langfuse"
    about = "exports of Langfuse: observations, traces, scores"
    joins = True

    def __init__(self) -> None:
        self._traces: dict[str, Json] = {}  # id -> trace record
        self._generations: dict[str, dict[str | int, Json]] = {}  # trace id -> observation id or number
        self._scores: dict[str, dict[str, float]] = {}
        self._groups: dict[str, str] = {}  # id -> scenario from an observation
        self._given: dict[str, str] = {}  # id -> scenario from the caller

    @staticmethod
    def recognises(record: Json) -> bool:
        is_observation = record.get("type") in KINDS and _get(record, "traceId") is not None
        is_score = "dataType" in record or "data_type" in record
        return is_observation or _is_trace(record) or (is_score and _get(record, "traceId") is not None)

    def read(self, record: Json, group: str | None = None) -> TracedAttempt | None:
        if group is not None:
            self._given.setdefault(str(record["id"] if _is_trace(record) else _get(record, "traceId")), group)
        if _is_trace(record):
            self._keep_trace(record)
        elif record.get("type") in KINDS:
            self._keep(record)
        else:
            self._keep_score(str(_get(record, "traceId")), record)
        return None

    def finish(self) -> Iterator[TracedAttempt]:
        for trace, generations in self._generations.items():
            about, scores = self._traces.get(trace, {}), self._scores.get(trace, {})
            attempt = _attempt(trace, about, list(generations.values()), scores)
            attempt.is_grouped = trace in self._given
            attempt.scenario = self._given.get(trace, self._groups.get(trace, attempt.scenario))
            yield attempt

    def _keep_trace(self, record: Json) -> None:
        trace = str(record["id"])
        self._traces[trace] = {key: value for key, value in record.items() if key not in ("observations", "scores")}
        for score in as_list(record.get("scores"), "scores"):
            if isinstance(score, dict):
                self._keep_score(trace, score)
        wrong: ValueError | None = None
        for observation in as_list(record.get("observations"), "observations"):
            try:
                if isinstance(observation, dict):
                    self._keep({"traceId": trace, **observation})
            except ValueError as error:  # continue with the other observations
                wrong = wrong or error
        if wrong is not None:
            raise wrong

    def _keep(self, observation: Json) -> None:
        if observation.get("type") == "GENERATION":
            try:
                call = _call(observation)
                TracedAttempt().add(call)  # validate: a bad call costs only this generation
            except ValueError:
                if observation.get("level") != "ERROR":
                    raise
                call = None  # failed calls have no reply
            known, id = self._generations.setdefault(str(_get(observation, "traceId")), {}), observation.get("id")
            known[len(known) if id is None else str(id)] = {**observation, "call": call}
        if scenario := _scenario(observation):
            self._groups.setdefault(str(_get(observation, "traceId")), scenario)

    def _keep_score(self, trace: str, score: Json) -> None:
        value = as_number(score.get("value"))
        if value is not None and isinstance(score.get("name"), str):
            self._scores.setdefault(trace, {})[score["name"]] = value


def _attempt(trace: str, about: Json, generations: list[Json], scores: dict[str, float]) -> TracedAttempt:
    generations.sort(key=lambda each: seconds(_get(each, "startTime")))
    times = [seconds(_get(generations[0], "startTime")), seconds(_get(generations[-1], "endTime"))]
    failed = [each for each in generations if each.get("level") == "ERROR"]
    attempt = TracedAttempt(
        id=trace,
        scenario=_scenario(about),
        reward=next(iter(scores.values())) if len(scores) == 1 else None,
        metrics=scores,
        metadata={key: about[key] for key in ("name", "tags", "metadata") if about.get(key)},
        error=f"langfuse: {_get(failed[-1], 'statusMessage') or 'the last call failed'}" if failed else None,
        started_at=times[0],
        duration_s=max(0.0, times[1] - times[0]),
    )
    for each in generations:
        if each["call"] is not None:
            attempt.add(each["call"])
    return attempt


def _scenario(record: Json) -> str | None:
    return named(_object(record.get("metadata")), GROUPS)


def _call(observation: Json) -> TracedCall:
    """Converts a generation. Raises ValueError without input messages or output reply."""
    asked, answered = _value(observation.get("input")), _value(observation.get("output"))
    tools: list[Any] = []
    if isinstance(asked, dict):
        tools, asked = as_list(asked.get("tools"), "tools"), asked.get("messages", asked)
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    messages = [asked] if isinstance(asked, dict) and "role" in asked else asked
    if not isinstance(messages, list) or not messages:
        raise ValueError("a generation without input messages")
    settings = _object(_get(observation, "modelParameters"))
    return TracedCall(messages, _reply(answered), tools, sampling=sampling_of(settings))


def _reply(output: Any) -> Json:
    if isinstance(output, list) and output:
        output = output[-1]
    if isinstance(output, dict) and isinstance(choices := output.get("choices"), list) and choices:
        output = as_object(choices[0], "choices").get("message")
    if isinstance(output, str):
        return {"role": "assistant", "content": output}
    if isinstance(output, dict) and (output.get("role") == "assistant" or "tool_calls" in output):
        return {"content": None, **output, "role": "assistant"}
    raise ValueError("a generation without a reply in the output")


def _is_trace(record: Json) -> bool:
    has_parts = isinstance(record.get("observations"), list)
    return "id" in record and has_parts and ("sessionId" in record or "timestamp" in record or "name" in record)


def _get(record: Json, name: str) -> Any:
    """Returns the value for a camelCase key or its snake_case form."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return record.get(name, record.get(snake))


def _value(value: Any) -> Any:
    """Decodes JSON lists and objects stored as strings; returns other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _object(value: Any) -> Json:
    found = _value(value)
    return found if isinstance(found, dict) else {}
