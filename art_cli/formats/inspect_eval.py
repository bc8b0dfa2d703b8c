"""Reader for inspect logs (`.eval`, a zip archive of JSON, and `.json`): messages and scores, no tokens.

Each epoch of a sample becomes an attempt; the sample id is the scenario id. Scores C, P, I and N become 1, 0.5, 0 and
0, like inspect's `value_to_float`.
"""

from typing import Any

from art_cli.formats.imported_attempt import (
    TracedAttempt,
    TracedCall,
    TraceReader,
    as_list,
    as_number,
    as_object,
    named,
    seconds,
)
from art_cli.runs.trajectory import Json

LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
ATTACHED = "attachment://"
MAX_RESOLVED = 64 * 2**20  # characters of all attachments per sample


class InspectSample(TraceReader):
    name = "inspect"
    about = ".eval and .json logs of inspect: an epoch of a sample is an attempt"

    @staticmethod
    def recognises(record: Json) -> bool:
        return isinstance(record.get("messages"), list) and "epoch" in record and "target" in record

    def read(self, record: Json, group: str | None = None) -> TracedAttempt:
        scores = {name: _number(score) for name, score in as_object(record.get("scores"), "scores").items()}
        known = {name: value for name, value in scores.items() if value is not None}
        error = record.get("error")
        attempt = TracedAttempt(
            id=record["uuid"] if isinstance(record.get("uuid"), str) else None,
            scenario=group or named(record, ("id",)),
            task={"input": record.get("input"), "target": record.get("target")},
            reward=next(iter(known.values())) if len(known) == 1 else None,
            metrics=known,
            metadata={**as_object(record.get("metadata"), "metadata"), "epoch": record.get("epoch")},
            error=f"inspect: {error.get('message')}" if isinstance(error, dict) else None,
            started_at=seconds(record.get("started_at")),
            duration_s=as_number(record.get("total_time")) or 0.0,
        )
        resolver = _Attachments(as_object(record.get("attachments"), "attachments"))
        messages = [_message(resolver.resolve(each)) for each in as_list(record.get("messages"), "messages")]
        replies = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not replies:
            raise ValueError("no assistant message")
        attempt.add(TracedCall(messages[: replies[-1]], messages[replies[-1]], _tools(record)))
        return attempt


def _number(score: Any) -> float | None:
    """Returns a numeric score; lists, objects and unknown words give None."""
    value = score.get("value") if isinstance(score, dict) else score
    if isinstance(value, str):
        return LETTERS.get(value, WORDS.get(value.lower(), _parsed(value)))
    return as_number(value)


def _parsed(text: str) -> float | None:
    try:
        return as_number(float(text))
    except ValueError:
        return None


def _message(message: Any) -> Json:
    """Converts an inspect message to OpenAI's format: separate thoughts, joined text parts, nested tool calls."""
    message = as_object(message, "messages")
    plain: Json = {"role": message.get("role"), "content": message.get("content")}
    if isinstance(parts := message.get("content"), list):
        parts = [as_object(part, "content") for part in parts]
        plain["content"] = "".join(str(part.get("text") or "") for part in parts if part.get("type") == "text")
        if thoughts := "".join(str(p.get("reasoning") or "") for p in parts if p.get("type") == "reasoning"):
            plain["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        plain["tool_calls"] = message["tool_calls"]
    if isinstance(message.get("tool_call_id"), str):
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def _tools(record: Json) -> list[Json]:
    found: dict[str, Json] = {}
    for event in as_list(record.get("events"), "events"):
        if isinstance(event, dict) and event.get("event") == "model":
            for tool in as_list(event.get("tools"), "tools"):
                if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                    found.setdefault(tool["name"], tool)
    return list(found.values())


class _Attachments:
    """Resolves inspect's attachment references, up to MAX_RESOLVED characters in total."""

    def __init__(self, attachments: Json) -> None:
        self._texts, self._left = attachments, MAX_RESOLVED

    def resolve(self, value: Any) -> Any:
        match value:
            case str() if value.startswith(ATTACHED):
                text = self._texts.get(value.removeprefix(ATTACHED), value)
                self._left -= len(text) if isinstance(text, str) else 0
                if self._left < 0:
                    raise ValueError(f"its attachments are more than {MAX_RESOLVED >> 20} Mi characters")
                return text
            case list():
                return [self.resolve(each) for each in value]
            case dict():
                return {key: self.resolve(each) for key, each in value.items()}
        return value
