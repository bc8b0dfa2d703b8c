"""Attempts as seen by a judge, and a tree that stores shared messages once. Pure.

An attempt consists of conversations, messages and segments, parsed from the trajectory's OpenAI messages. Messages with
the same content are equal regardless of their random call ids, so attempts can be merged. Parsing never fails: unknown
content is shown as JSON. group.py shortens attempts, and prompt.py renders them for the judge.

Each part in the tree is a run of messages. The root is an empty part. The path from the root to a conversation's last
part spells the conversation:

    attempts   s u a1 x1    s u a1 x2    s u a2       (s u: the same system prompt and task)
    tree       [s u] - [a1] - [x1]
                     |      - [x2]
                     - [a2]
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from art_cli.judges.judge_text import call_text, clean
from art_cli.runs.trajectory import Json, Trajectory

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THOUGHT_PARTS = frozenset({"thinking", "reasoning"})
_DATA_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image"), "image"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("file", "input_file"), "file"),
}


class Segment(NamedTuple):
    """One piece of a message. `omitted` is the number of characters cut between text and tail.

    Example: Segment("call", 'search({"query": "tides"})')
    """

    kind: str  # text, thought, call, refusal, image, audio, file, other
    text: str
    omitted: int = 0
    tail: str = ""


class Message(NamedTuple):
    """One message. Example: Message("tool", (Segment("text", "3 results"),), answers=2) answers the second call."""

    role: str  # one of ROLES; "message" for other roles; "cut" replaces `omitted` messages
    segments: tuple[Segment, ...]
    answers: int = 0  # call number (from 1) answered by a tool message; 0 for an only call
    omitted: int = 0


Conversation = tuple[Message, ...]


class Attempt(NamedTuple):
    """All messages of an attempt: the main conversation and side conversations (sub-agents, edited histories)."""

    main: Conversation
    sides: tuple[Conversation, ...] = ()

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return (*self.sides, self.main)


def read_attempt(trajectory: Trajectory) -> Attempt:
    """Parses a trajectory. Skips side conversations that are prefixes of other conversations."""
    main = read_conversation(trajectory.messages)
    sides = [read_conversation(branch) for branch in trajectory.branches]
    kept: list[Conversation] = []
    for index, side in enumerate(sides):
        others = [main, *kept, *sides[index + 1 :]]
        if not any(other[: len(side)] == side for other in others):
            kept.append(side)
    return Attempt(main, tuple(kept))


def read_conversation(messages: Sequence[Any]) -> Conversation:
    """Parses OpenAI messages. Tool messages refer to their call by number, not by id."""
    conversation = []
    numbers: dict[str, int] = {}
    for raw in messages:
        message = raw if isinstance(raw, dict) else {"content": raw}
        if calls := message.get("tool_calls"):
            numbers = _call_numbers(calls)
        role = message.get("role")
        call_id = message.get("tool_call_id")
        conversation.append(
            Message(
                role=role if isinstance(role, str) and role in ROLES else "tool" if role == "function" else "message",
                segments=_read_segments(message),
                answers=numbers.get(call_id, 0) if isinstance(call_id, str) else 0,
            )
        )
    return tuple(conversation)


def _call_numbers(calls: Any) -> dict[str, int]:
    """Returns call numbers (from 1) by call id; empty for a single call."""
    if not isinstance(calls, list) or len(calls) < 2:
        return {}
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    return {name: number for number, name in enumerate(ids, 1) if isinstance(name, str)}


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
    segments += [Segment("call", call_text(call)) for call in (calls if isinstance(calls, list) else [calls])]
    return tuple(segments)


def _read_content(content: Any) -> list[Segment]:
    if content is None or content == "":
        return []
    if not isinstance(content, list):
        return [Segment("text", clean(content))]
    return [_read_part(part) for part in content]


def _read_part(part: Any) -> Segment:
    """Parses an element of a content list."""
    if not isinstance(part, dict):
        return Segment("text", clean(part))
    named = part.get("type")
    kind = named if isinstance(named, str) else ""  # may be any JSON value, including unhashable values
    if kind in _TEXT_PARTS:
        return Segment("text", clean(part.get("text")))
    if kind in _DATA_PARTS:
        return Segment(_DATA_PARTS[kind], _describe(part))
    if kind in _THOUGHT_PARTS:
        return Segment("thought", clean(part.get("thinking") or part.get("text") or part.get("summary")))
    if kind == "refusal":
        return Segment("refusal", clean(part.get("refusal")))
    return Segment("other", clean(part))


def _describe(part: Json) -> str:
    """Returns size and digest of binary data, so the judge can tell equal data apart from different data.

    Example: {"image_url": {"url": "data:image/png;base64,AAAA"}} -> "image/png, 4 characters, sha256 63c1dd95". Links
    are shown unchanged.
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


def digest(attempt: Attempt) -> str:
    """Returns a digest of the attempt's content."""
    return hashlib.sha256(msgspec.json.encode(attempt)).hexdigest()


@dataclass(eq=False)
class Part:
    """A run of messages following `parent`. `attempts` are the indices of all attempts passing through it."""

    parent: "Part | None"
    messages: list[Message] = field(default_factory=list)
    attempts: set[int] = field(default_factory=set)
    children: list["Part"] = field(default_factory=list)  # in order of first visit

    @property
    def is_shared(self) -> bool:
        return len(self.attempts) > 1

    def walk(self) -> Iterator["Part"]:
        """Yields this part and all descendants, parents first."""
        waiting = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting += reversed(part.children)


@dataclass(frozen=True)
class AttemptTree:
    """All parts, and for each attempt the last parts of its conversations (main conversation last)."""

    root: Part
    ends: list[list[Part]]

    def parts(self) -> list[Part]:
        """Returns all parts except the empty root, parents first."""
        return list(self.root.walk())[1:]


def build(attempts: Sequence[Attempt]) -> AttemptTree:
    """Builds the tree. Children follow the order of `attempts`."""
    root = Part(None)
    steps: dict[tuple[int, Message], Part] = {}  # (parent id, message) -> one-message part
    ends = []
    for index, attempt in enumerate(attempts):
        ends.append([_insert(conversation, index, root, steps) for conversation in attempt.conversations])
    stops = {id(part) for own in ends for part in own}
    merged: dict[int, Part] = {}  # one-message part id -> merged part
    _merge(root, stops, merged)
    return AttemptTree(root, [[merged.get(id(part), part) for part in own] for own in ends])


def _insert(conversation: Sequence[Message], index: int, root: Part, steps: dict[tuple[int, Message], Part]) -> Part:
    part = root
    part.attempts.add(index)
    for message in conversation:
        step = steps.get((id(part), message))
        if step is None:
            step = steps[id(part), message] = Part(part, [message])
            part.children.append(step)
        step.attempts.add(index)
        part = step
    return part


def _merge(root: Part, stops: set[int], merged: dict[int, Part]) -> None:
    """Merges each part with its only child, unless a conversation ends or forks in between."""
    waiting = list(root.children)
    while waiting:
        part = waiting.pop()
        last = part
        while len(last.children) == 1 and id(last) not in stops and last.children[0].attempts == part.attempts:
            last = last.children[0]
            part.messages += last.messages
            merged[id(last)] = part
        part.children = last.children
        for child in part.children:
            child.parent = part
        waiting += part.children


def repeated_texts(parts: Sequence[Part], min_length: int) -> list[str]:
    """Returns, in order of appearance, texts of at least `min_length` characters that the tree has repeatedly."""
    counts = Counter(
        segment.text
        for part in parts
        for message in part.messages
        for segment in message.segments
        if not segment.omitted and len(segment.text) >= min_length
    )
    return [text for text, count in counts.items() if count > 1]
