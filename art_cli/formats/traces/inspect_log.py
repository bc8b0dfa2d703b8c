"""Writes attempts as an inspect log (`.eval`): a zip archive of JSON for `inspect view` and other inspect tools.

    header.json, summaries.json        log metadata, one summary per attempt
    samples/{scenario}_epoch_{n}.json  an attempt: messages, model and tool calls as events, scores

Uses only zip and JSON, because inspect_ai's models keep the whole log in memory. Scenarios become samples, attempts
epochs; rewards, judge scores and rollout metrics become scores. Messages shared by calls are stored once.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import IO, Any

import msgspec

from art_cli.chat.replies import thoughts_of
from art_cli.chat.requests import text_of
from art_cli.formats.traces.saved import Saved, SavedPart, skipped
from art_cli.formats.traces.spans import (
    ModelCall,
    ToolUse,
    calls_of,
    num_completion,
    num_prompt,
    parsed,
    reward_of,
    tool_uses,
)
from art_cli.runs.durable import new_file
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, score_names
from art_cli.runtime.errors import printable

VERSION = 2  # inspect log format version
MAX_ID = 120  # characters per sample id, used in archive file names
LIMITS = {"turn_limit": "turn", "context_length_exceeded": "context"}  # our limit -> inspect's limit
EVENT_LIMITS = {"turn", "token"}  # limits also allowed in events
STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
MAX_TIME = 253402300799.0  # end of year 9999, the latest datetime


@dataclass
class LogTotals:
    samples: list[Json] = field(default_factory=list)  # summaries
    epochs: dict[str, int] = field(default_factory=dict)  # sample id -> number of attempts
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)  # group -> (number of attempts, group_size)
    values: dict[str, list[float]] = field(default_factory=dict)  # scorer -> values
    usage: list[int] = field(default_factory=lambda: [0, 0])  # prompt and completion tokens
    begin: float = MAX_TIME
    end: float = 0.0

    @property
    def is_complete(self) -> bool:
        return all(num >= size for num, size in self.groups.values())


def log_path(directory: Path, saved: Saved, part: SavedPart) -> Path:
    """Example: logs/mine-train-0003.eval. Underscores have a meaning in inspect's file names."""
    return directory / f"{_task(saved, part).replace('_', '-')}-{part.step:04d}.eval"


def write_log(path: Path, saved: Saved, part: SavedPart) -> int:
    """Returns the number of attempts written; no file for none. Raises DataError for unreadable lines."""
    attempts = part.attempts()
    first = next(attempts, None)
    if first is None:
        return 0
    with new_file(path) as file:
        return _write(file, saved, part, chain([first], attempts))


def _write(file: IO[bytes], saved: Saved, part: SavedPart, attempts: Iterable[Trajectory]) -> int:
    totals = LogTotals()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for attempt in attempts:
            with skipped(attempt, part):
                sample = _Sample(attempt, saved, totals).record()
                summary = _summary(sample)
                _add(archive, f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
                totals.samples.append(summary)
        spec = _spec(saved, part, totals)
        plan = {"name": "plan", "steps": [{"solver": "rollout", "params": {}, "params_passed": {}}], "config": {}}
        _add(archive, "_journal/start.json", {"version": VERSION, "eval": spec, "plan": plan})
        _add(archive, "summaries.json", totals.samples)
        _add(archive, "header.json", _header(spec, plan, saved, totals))
    return len(totals.samples)


def _add(archive: zipfile.ZipFile, name: str, value: Any) -> None:
    archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), msgspec.json.encode(value), zipfile.ZIP_DEFLATED)


# --- the whole log ----------------------------------------------------------------------------------------------------


def _task(saved: Saved, part: SavedPart) -> str:
    return f"{saved.source.name}-{part.split}"


def _spec(saved: Saved, part: SavedPart, totals: LogTotals) -> Json:
    task = _task(saved, part)
    ids = list(totals.epochs)
    return {
        "eval_id": _hash(saved.source.id, part.split, part.step),
        "run_id": _hash(saved.source.id),
        "created": _time(totals.begin),
        "task": task,
        "task_id": _hash(saved.source.id, part.split),
        "task_version": 0,
        "task_attribs": {},
        "task_args": {"step": part.step, "split": part.split},
        "solver": "rollout",
        "dataset": {"name": part.split, "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": saved.source.model,
        "model_args": {},
        "config": {"epochs": max(totals.epochs.values(), default=1)},
        "packages": {"art-cli": version("art-cli")},
        "scorers": [{"name": name, "options": {}, "metrics": []} for name in totals.values],
        "metadata": {"run": saved.source.name, "split": part.split, "step": part.step},
        "tags": [part.split],
    }


def _header(spec: Json, plan: Json, saved: Saved, totals: LogTotals) -> Json:
    scores = [
        {"name": name, "scorer": name, "params": {}, "metrics": {each["name"]: each for each in _metrics(values)}}
        for name, values in totals.values.items()
    ]
    num = len(totals.samples)
    return {
        "version": VERSION,
        # missing attempts are still running, or the run was killed
        "status": "success" if totals.is_complete else "cancelled",
        "eval": spec,
        "plan": plan,
        "results": {
            "total_samples": max(num, sum(size for _, size in totals.groups.values())),
            "completed_samples": sum(not sample.get("error") for sample in totals.samples),
            "scores": scores,
        },
        "stats": {
            "started_at": _time(totals.begin),
            "completed_at": _time(totals.end),
            "model_usage": {saved.source.model: _usage(*totals.usage)},
        },
    }


def _metrics(values: Sequence[float]) -> Iterator[Json]:
    yield {"name": "mean", "value": fmean(values), "params": {}}
    if len(values) > 1:
        yield {"name": "stderr", "value": stdev(values) / len(values) ** 0.5, "params": {}}


def _summary(sample: Json) -> Json:
    kept = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "started_at", "completed_at")
    summary = {name: sample[name] for name in (*kept, "total_time", "working_time", "uuid")}
    return summary | {
        "input": _first_text(sample["input"])[:500],
        "error": sample["error"]["message"] if "error" in sample else None,
        "limit": sample["limit"]["type"] if "limit" in sample else None,
        "completed": True,
        "message_count": len(sample["messages"]),
        "metadata": {name: sample["metadata"][name] for name in ("group_id", "step") if name in sample["metadata"]},
    }


def _first_text(said: str | list[Json]) -> str:
    return said if isinstance(said, str) else next((_plain(each) for each in said if each["role"] == "user"), "")


def _plain(message: Json) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


# --- one attempt ------------------------------------------------------------------------------------------------------


class _Sample:
    def __init__(self, attempt: Trajectory, saved: Saved, totals: LogTotals) -> None:
        self.attempt, self.model, self.totals = attempt, saved.source.model, totals
        self.begin = _bounded(attempt.started_at)
        self.end = _bounded(attempt.started_at + max(0.0, attempt.duration_s))
        self.calls = calls_of(attempt)
        self._messages: list[Json] = []  # messages of all conversations; events refer to their indexes
        self._starts: dict[int, int] = {}  # conversation -> start index in `_messages`
        for conversation in [*attempt.branches, attempt.messages]:
            self._starts[id(conversation)] = len(self._messages)
            self._messages += [_message(each, f"{len(self._messages) + n}") for n, each in enumerate(conversation)]

    def record(self) -> Json:
        attempt, totals = self.attempt, self.totals
        sample = self._id()
        epoch = totals.epochs[sample] = totals.epochs.get(sample, 0) + 1
        num, _ = totals.groups.get(attempt.group_id, (0, 0))
        totals.groups[attempt.group_id] = (num + 1, attempt.group_size)
        totals.begin, totals.end = min(totals.begin, self.begin), max(totals.end, self.end)
        messages = self._messages[self._starts[id(attempt.messages)] :]
        last = self.calls[-1] if self.calls else None
        scores = dict(self._scores())
        for name, score in scores.items():
            totals.values.setdefault(name, []).append(score["value"])
        usage = num_prompt(attempt), num_completion(attempt)
        asked: Json = {"id": sample, "input": self._input(messages), "target": self._target(), "metadata": {}}
        totals.usage = [totals.usage[0] + usage[0], totals.usage[1] + usage[1]]
        record: Json = {
            **asked,
            "epoch": epoch,
            "messages": messages,
            "output": self._output(last) if last else {"model": self.model, "choices": [], "completion": ""},
            "scores": scores,
            "metadata": self._metadata(),
            "store": {},
            "events": [*self._events(asked, scores)],
            "events_data": {"messages": self._messages, "calls": []},
            "model_usage": {self.model: _usage(*usage)},
            "started_at": _time(self.begin),
            "completed_at": _time(self.end),
            "total_time": self.end - self.begin,
            "working_time": self.end - self.begin,
            "uuid": attempt.id,
            "attachments": {},
        }
        if attempt.error is not None:
            record["error"] = _error(attempt.error)
        if attempt.limit is not None:
            kind = LIMITS.get(attempt.limit, "custom")
            record["limit"] = {"type": kind, "limit": float(len(attempt.turns)), "reason": attempt.limit}
        return record

    def _id(self) -> str:
        """Returns the scenario id, sanitized for file names."""
        text = self.attempt.scenario_id
        shown = printable(text, limit=MAX_ID).replace("/", "-").replace("\\", "-")
        return shown if shown == text else f"{shown}-{_hash(text)[:8]}"

    def _input(self, messages: list[Json]) -> str | list[Json]:
        before = [*takewhile(lambda message: message["role"] != "assistant", messages)]
        return before or msgspec.json.encode(self.attempt.scenario).decode()

    def _target(self) -> str:
        found = next((self.attempt.scenario[key] for key in ("target", "answer") if key in self.attempt.scenario), "")
        return found if isinstance(found, str) else msgspec.json.encode(found).decode()

    def _metadata(self) -> Json:
        attempt = self.attempt
        facts = {
            "group_id": attempt.group_id,
            "step": attempt.step,
            "attempt": attempt.index,
            "trajectory": attempt.id,
            "policy_steps": sorted({turn.step for turn in attempt.turns}),
            "num_conversations": 1 + len(attempt.branches),
            "limit": attempt.limit,
        }
        return {"scenario": attempt.scenario, **facts, **({"rollout": attempt.metadata} if attempt.metadata else {})}

    def _scores(self) -> Iterator[tuple[str, Json]]:
        attempt = self.attempt
        reward = reward_of(attempt)
        judged = attempt.scores if isinstance(attempt, ScoredTrajectory) else []
        words = "\n\n".join(f"{score.judge}: {score.explanation}" for score in judged if score.explanation)
        if reward is not None:
            yield "reward", {"value": reward, "explanation": words or None, "metadata": {}}
        for judge, score in zip(score_names(judged), judged, strict=True):
            facts = {"model": score.model, "votes": score.votes, "spread": score.spread, "cost_usd": score.cost_usd}
            name = judge if judge != "reward" else "judge.reward"
            yield name, {"value": score.score, "explanation": score.explanation, "metadata": facts}
        if isinstance(attempt, ScoredTrajectory) and attempt.returned_reward not in (None, reward):
            yield "returned_reward", {"value": attempt.returned_reward, "metadata": {}}
        for name, value in attempt.metrics.items():
            if not name.startswith("num_"):  # counted by the gateway
                yield f"metric.{name}", {"value": value, "metadata": {}}

    # --- events -------------------------------------------------------------------------------------------------------

    def _events(self, asked: Json, scores: Mapping[str, Json]) -> Iterator[Json]:
        attempt = self.attempt
        yield self._event("sample_init", self.begin, sample=asked, state={})
        for call in self.calls:
            yield self._model(call)
            for tool in call.tools:
                yield self._tool(tool, call.end)
        if attempt.limit is not None and (kind := LIMITS.get(attempt.limit, "custom")) in EVENT_LIMITS:
            yield self._event("sample_limit", self.end, type=kind, message=attempt.limit, limit=len(attempt.turns))
        if attempt.error is not None:
            yield self._event("error", self.end, error=_error(attempt.error))
        for name, score in scores.items():
            yield self._event("score", self.end, scorer=name, score=score, intermediate=False)

    def _event(self, kind: str, time: float, **fields: Any) -> Json:
        return {"event": kind, "timestamp": _time(time), "working_start": max(0.0, time - self.begin), **fields}

    def _model(self, call: ModelCall) -> Json:
        start = self._starts[id(call.conversation)]
        turn = call.turn
        config = {"temperature": turn.temperature, "top_p": turn.top_p, "top_k": turn.top_k} if turn else {}
        return self._event(
            "model",
            call.begin,
            model=self.model,
            input=[],
            input_refs=[[start, start + call.place]],
            tools=_tools(self.attempt.tools),
            tool_choice="auto",
            config=config,
            output=self._output(call),
            completed=_time(call.end),
            working_time=call.end - call.begin,
            metadata={"policy_step": turn.step, "turn": call.number} if turn else {},
        )

    def _tool(self, tool: ToolUse, time: float) -> Json:
        return self._event(
            "tool",
            time,
            type="function",
            id=tool.id,
            function=tool.name,
            arguments=_arguments(tool),
            result=tool.result or "",
            events=[],
            completed=_time(time),
            working_time=0.0,
        )

    def _output(self, call: ModelCall) -> Json:
        message = self._messages[self._starts[id(call.conversation)] + call.place]
        turn = call.turn
        stop = STOPS.get(turn.finish_reason, "unknown") if turn else "stop"
        output: Json = {
            "model": self.model,
            "choices": [{"message": message, "stop_reason": stop}],
            "completion": _plain(message),
            "time": call.end - call.begin,
        }
        return output | ({"usage": _usage(call.num_prompt or 0, len(turn.sampled_ids))} if turn else {})


def _message(message: Json, id_: str) -> Json:
    role = str(message.get("role"))
    text = text_of(message.get("content"))
    thoughts = thoughts_of(message)
    if role == "tool":
        known = {"tool_call_id": str(message.get("tool_call_id")), "function": message.get("name")}
        return {"id": id_, "role": "tool", "content": text, **{k: v for k, v in known.items() if v is not None}}
    if role != "assistant":
        shown = "system" if role in ("system", "developer") else "user"
        return {"id": id_, "role": shown, "content": text, "source": "input"}
    content: Any = text
    if thoughts:
        content = [{"type": "reasoning", "reasoning": str(thoughts)}, {"type": "text", "text": text}]
    record: Json = {"id": id_, "role": "assistant", "content": content, "source": "generate"}
    calls = [
        {"id": tool.id, "function": tool.name, "arguments": _arguments(tool), "type": "function"}
        for tool in tool_uses(message)
    ]
    return record | ({"tool_calls": calls} if calls else {})


def _arguments(tool: ToolUse) -> Json:
    """Returns the arguments as an object, as required by inspect; other values are wrapped."""
    found = parsed(tool.arguments)
    return found if isinstance(found, dict) else {"arguments": found}


def _tools(tools: Sequence[Json]) -> list[Json]:
    found = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function["parameters"] if isinstance(function.get("parameters"), dict) else {}
            properties, required = schema.get("properties"), schema.get("required")
            shown = properties if isinstance(properties, dict) else {}
            parameters = {
                "type": "object",
                "properties": {name: _property(each) for name, each in shown.items()},
                "required": required if isinstance(required, list) else [],
                "additionalProperties": False,
            }
            description = str(function.get("description") or "")
            found.append({"name": function["name"], "description": description, "parameters": parameters})
    return found


def _property(schema: Any) -> Json:
    """Returns the parts of a parameter schema displayed by inspect: plain type and description."""
    known = schema if isinstance(schema, dict) else {}
    types = ("string", "integer", "number", "boolean", "array", "object", "null")
    shown = {"type": known["type"]} if known.get("type") in types else {}
    return shown | ({"description": known["description"]} if isinstance(known.get("description"), str) else {})


def _error(text: str) -> Json:
    return {"message": text, "traceback": text, "traceback_ansi": text}


def _usage(num_prompt: int, num_completion: int) -> Json:
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _bounded(seconds: float) -> float:
    return min(max(0.0, seconds), MAX_TIME)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(_bounded(seconds), UTC).isoformat()


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode(errors="replace")).hexdigest()[:22]
