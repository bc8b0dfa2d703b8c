"""An attempt as a judge sees it: conversations of messages of segments, read from a trajectory's OpenAI messages.

Pure. Two messages that say the same are equal here, whatever their random call ids, so that attempts can be laid over
each other (`tree`). Nothing a message holds makes reading fail: what is not known is shown as JSON. How it is written
down for the judge is `prompt`'s business; what is left out for length is `shorten`'s.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from art_cli.judges.text import clean
from art_cli.trajectory import Json, Trajectory

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_THOUGHT_PARTS = frozenset({"thinking", "reasoning"})


class Segment(NamedTuple):
    """A stretch of one message. Where `omitted` is not 0, so many characters are left out between text and tail.

    Example: Segment("call", 'search({"query": "tides"})')
    """

    kind: str  # text, thought, call, refusal, image, audio, file, other
    text: str
    omitted: int = 0
    tail: str = ""


class Message(NamedTuple):
    """One message. Example: Message("tool", (Segment("text", "3 results"),), answers=2) answers the second call."""

    role: str  # one of ROLES; "message" for any other; "cut" stands for `omitted` messages left out
    segments: tuple[Segment, ...]
    answers: int = 0  # which of the last reply's calls a tool message answers, from 1; 0: there was only one
    omitted: int = 0


Conversation = tuple[Message, ...]


class Attempt(NamedTuple):
    """All an attempt said and saw: its last conversation, and the others (sub-agents, edited histories)."""

    main: Conversation
    sides: tuple[Conversation, ...] = ()

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return (*self.sides, self.main)


def read_attempt(trajectory: Trajectory) -> Attempt:
    """The trajectory's conversations. A side conversation that only begins another one is left out: it adds nothing."""
    main = read_conversation(trajectory.messages)
    sides = [read_conversation(branch) for branch in trajectory.branches]
    kept: list[Conversation] = []
    for place, side in enumerate(sides):
        others = [main, *kept, *sides[place + 1 :]]
        if not any(other[: len(side)] == side for other in others):
            kept.append(side)
    return Attempt(main, tuple(kept))


def read_conversation(messages: Sequence[Any]) -> Conversation:
    """OpenAI messages as `Message`s; tool messages are told which of several calls they answer by its place."""
    conversation = []
    places: dict[str, int] = {}
    for raw in messages:
        message = raw if isinstance(raw, dict) else {"content": raw}
        if calls := message.get("tool_calls"):
            places = _call_places(calls)
        role = message.get("role")
        call_id = message.get("tool_call_id")
        conversation.append(
            Message(
                role=role if isinstance(role, str) and role in ROLES else "tool" if role == "function" else "message",
                segments=_read_segments(message),
                answers=places.get(call_id, 0) if isinstance(call_id, str) else 0,
            )
        )
    return tuple(conversation)


def _call_places(calls: Any) -> dict[str, int]:
    """The place of each call by its id, from 1; nothing where there is only one call."""
    if not isinstance(calls, list) or len(calls) < 2:
        return {}
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    return {name: place for place, name in enumerate(ids, 1) if isinstance(name, str)}


def _read_segments(message: Json) -> tuple[Segment, ...]:
    segments = []
    for key in ("reasoning_content", "reasoning"):
        if thought := message.get(key):
            segments.append(Segment("thought", clean(thought)))
            break
    segments += _read_content(message.get("content"))
    if refusal := message.get("refusal"):
        segments.append(Segment("refusal", clean(refusal)))
    calls = message.get("tool_calls") or ([{"function": call}] if (call := message.get("function_call")) else [])
    segments += [_read_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return tuple(segments)


def _read_content(content: Any) -> list[Segment]:
    if content is None or content == "":
        return []
    if not isinstance(content, list):
        return [Segment("text", clean(content))]
    return [_read_part(part) for part in content]


def _read_part(part: Any) -> Segment:
    """One element of a content list."""
    if not isinstance(part, dict):
        return Segment("text", clean(part))
    named = part.get("type")
    kind = named if isinstance(named, str) else ""  # anything may stand there; a list could not even be looked up
    if kind in _TEXT_PARTS:
        return Segment("text", clean(part.get("text")))
    if kind in _IMAGE_PARTS:
        return Segment("image", _describe(part))
    if kind in _THOUGHT_PARTS:
        return Segment("thought", clean(part.get("thinking") or part.get("text") or part.get("summary")))
    if kind == "refusal":
        return Segment("refusal", clean(part.get("refusal")))
    if kind in ("input_audio", "audio"):
        return Segment("audio", _describe(part))
    if kind in ("file", "input_file"):
        return Segment("file", _describe(part))
    return Segment("other", clean(part))


def _describe(part: Json) -> str:
    """Bytes that a text cannot show, by size and digest: equal ones are seen to be equal.

    Example: {"image_url": {"url": "data:image/png;base64,AAAA"}} -> "image/png, 4 characters, sha256 63c1dd95".
    A link is shown as it is.
    """
    source = next((part[key] for key in ("image_url", "input_audio", "file", "source", "image") if key in part), part)
    data = source.get("url") or source.get("data") or source if isinstance(source, dict) else source
    text = clean(data)
    if text.startswith(("http://", "https://")):
        return text
    kind, _, body = text.rpartition(",")
    kind = kind.removeprefix("data:").partition(";")[0] if kind.startswith("data:") else ""
    digest = hashlib.sha256(body.encode()).hexdigest()[:8]
    return f"{kind[:40] or 'data'}, {len(body)} characters, sha256 {digest}"


def _read_call(call: Any) -> Segment:
    """A tool call as `name(arguments)`."""
    function = call.get("function", call.get("custom")) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return Segment("call", clean(call))
    arguments = function.get("arguments", function.get("input"))
    return Segment("call", f"{clean(function.get('name'))}({clean(arguments)})")


def digest(attempt: Attempt) -> str:
    """A name for the attempt's content: equal for equal attempts, whatever their trajectory or place."""
    return hashlib.sha256(msgspec.json.encode(attempt)).hexdigest()
