"""IndexRow: the indexed part of a line, for each trajectory in the line.

A line is an art trajectory (scored or not), an ART group, or a conversation, as in judges/files/judged_files.py.
"""

import sys
from typing import Any, Literal

import msgspec

from art_cli.runs.json_lines import decode
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import printable

MAX_SHOWN = 64 * 2**20  # largest displayed line in bytes
MAX_LABEL = 200  # characters of a group's label
MAX_SOURCE = 80  # characters of a source name
MAX_ID = 1000  # characters of an id; longer ids are replaced by the line number
QUESTIONS = ("question", "prompt", "task", "instruction", "problem", "goal")  # scenario fields used as labels
MIN_QUESTION = 20  # minimum characters for a message to count as a question
_ANY = msgspec.json.Decoder()

Kind = Literal["own", "art", "plain"]  # an art trajectory, an ART group, or a conversation


class IndexRow(msgspec.Struct, gc=False):
    """A trajectory in the index.

    Example: IndexRow("s0003-g0001-a02", "s0003-g0001", 2, "task-7", offset=81_220, length=4_100, reward=0.5)
    """

    id: str  # unique within the step; used in links
    group: str
    index: int  # position in the group
    scenario: str
    offset: int = 0  # offset of the line in the file
    length: int = 0  # bytes of the line
    kind: Kind = "own"
    part: int = 0  # position in the line, for ART groups
    file: int = 0  # file number in the step
    reward: float | None = None
    error: str | None = None  # kind of error
    source: str = ""  # from rollout.sources
    num_turns: int = 0
    num_tokens: int | None = None  # sampled tokens, if known
    is_scored: bool = False  # True if the line contains a judge's reward


class _Head(msgspec.Struct):
    """The indexed fields of a line. `Any` accepts fields of a wrong type."""

    id: Any = None
    group_id: Any = None
    group_size: Any = None
    index: Any = None
    scenario: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    messages_and_choices: msgspec.Raw = msgspec.Raw()
    trajectories: msgspec.Raw = msgspec.Raw()
    exceptions: msgspec.Raw = msgspec.Raw()
    turns: msgspec.Raw = msgspec.Raw()
    reward: Any = msgspec.UNSET
    returned_reward: Any = None
    error: Any = None
    source: Any = None
    metrics: Any = None


class _Turn(msgspec.Struct):
    sampled_ids: list[int] = []


_HEAD = msgspec.json.Decoder(_Head)
_TURNS = msgspec.json.Decoder(list[_Turn])


class Labels:
    """Each group's label, from the group's initial line."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def add(self, group: str, head: _Head) -> None:
        if group not in self.of:
            self.of[group] = _label(_value(head.scenario), _value(head.messages or head.messages_and_choices))


def read_rows(line: bytes, number: int, labels: Labels) -> list[IndexRow]:
    """Returns the rows of line `number`, without file positions. Raises ValueError if the line has no trajectory."""
    head = decode(line, _HEAD)
    if bytes(head.trajectories):
        return _art_rows(head, number, labels)
    if isinstance(head.id, str) and isinstance(head.group_id, str) and isinstance(head.index, int):
        return [_own_row(head, number, labels)]
    if bytes(head.messages) or bytes(head.messages_and_choices):
        return [_plain_row(head, number, labels)]
    raise ValueError('expected a trajectory, an ART group, or {"messages": [...]}')


def _own_row(head: _Head, number: int, labels: Labels) -> IndexRow:
    group, metrics = name(head.group_id, number), head.metrics if isinstance(head.metrics, dict) else {}
    labels.add(group, head)
    scenario = _value(head.scenario)
    id = name(scenario.get("id", group) if isinstance(scenario, dict) else group, number)
    source = sys.intern(printable(head.source, limit=MAX_SOURCE)) if isinstance(head.source, str) else ""
    reward = head.returned_reward if head.reward is msgspec.UNSET else head.reward
    num_turns, num_tokens = _count(head, metrics)
    return IndexRow(
        id=name(head.id, number),
        group=group,
        index=head.index if 0 <= head.index < 2**31 else 0,
        scenario=f"{source}/{id}" if source else id,  # sources may have equal ids
        reward=number_of(reward),
        error=_kind(head.error),
        source=source,
        num_turns=num_turns,
        num_tokens=num_tokens,
        is_scored=number_of(head.reward) is not None,
    )


def _plain_row(head: _Head, number: int, labels: Labels, *, group: str | None = None, part: int = 0) -> IndexRow:
    if group is None:
        group = name(head.group_id, number) if head.group_id is not None else _asked(head)
    labels.add(group, head)
    messages = _value(head.messages_and_choices or head.messages)
    roles = [message.get("role") for message in messages or () if isinstance(message, dict)]
    fallback = f"line-{number}" if not part else f"line-{number}/{part}"
    return IndexRow(
        id=name(head.id, number) if isinstance(head.id, str | int) else fallback,
        group=group,
        index=part,
        scenario=group,
        kind="plain",
        part=part,
        reward=number_of(head.returned_reward if head.reward is msgspec.UNSET else head.reward),
        error=_kind(head.error),
        num_turns=roles.count("assistant"),
    )


def _art_rows(head: _Head, number: int, labels: Labels) -> list[IndexRow]:
    """Returns an ART group's trajectories, followed by its exceptions as trajectories with an error."""
    group = f"line-{number}"
    try:
        inner = msgspec.json.decode(head.trajectories, type=list[_Head])
        failures = _value(head.exceptions) or []
        rows = [_plain_row(each, number, labels, group=group, part=part) for part, each in enumerate(inner)]
        for part, failure in enumerate(failures, len(rows)):
            kind = failure.get("type") if isinstance(failure, dict) else None
            row = IndexRow(f"{group}/{part}", group, part, group, part=part, error=_kind(str(kind)))
            rows.append(row)
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(str(error)) from error
    for row in rows:
        row.id, row.kind = f"{group}/{row.part}", "art"
    labels.of.setdefault(group, group)
    return rows


# --- values written by arbitrary programs -----------------------------------------------------------------------------


def name(value: Any, number: int) -> str:
    """Returns the value as an id for URLs, or `line-7` if it is unsuitable."""
    text = str(value) if isinstance(value, str | int | float) else ""
    if not text or len(text) > MAX_ID or text in (".", ".."):
        return f"line-{number}"
    return sys.intern(text)


def number_of(value: Any) -> float | None:
    """Returns numbers that a run may have; larger ones would overflow in a mean."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= MAX_NUMBER else None


def _count(head: _Head, metrics: Json) -> tuple[int, int | None]:
    """Returns the recorder's counts of turns and sampled tokens, or counts them (None if not recorded)."""
    num_turns, num_tokens = number_of(metrics.get("num_turns")), number_of(metrics.get("num_sampled"))
    if num_turns is not None and num_tokens is not None:
        return int(num_turns), int(num_tokens)
    turns = _TURNS.decode(head.turns) if bytes(head.turns) else []
    return len(turns), sum(len(turn.sampled_ids) for turn in turns) if turns else None


def _kind(error: Any) -> str | None:
    return sys.intern(error.partition(":")[0][:80]) if isinstance(error, str) and error else None


def _value(raw: msgspec.Raw) -> Any:
    """Returns a field's value; None if missing or torn."""
    return decode(bytes(raw), _ANY) if bytes(raw) else None


def _asked(head: _Head) -> str:
    """Returns a group name for conversations without a group: their initial question."""
    from art_cli.formats.imported_attempt import first_question  # slow import, only for conversations without a group

    messages = _value(head.messages_and_choices or head.messages)
    plain = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    return first_question([{"role": str(each.get("role")), "content": each.get("content")} for each in plain])


def _label(scenario: Any, messages: Any) -> str:
    """Returns a group's label: the scenario's question, a question-like message, other scenario values, any message."""
    rest = {key: value for key, value in scenario.items() if key != "id"} if isinstance(scenario, dict) else {}
    for name in QUESTIONS:
        if isinstance(rest.get(name), str) and rest[name].strip():
            return str(rest[name][:MAX_LABEL])
    listed = messages if isinstance(messages, list) else []
    said = [message for message in listed if isinstance(message, dict) and message.get("role") == "user"]
    asked = text_of(said[0].get("content")) if said else ""
    if rest and len(asked) < MIN_QUESTION:
        return ", ".join(f"{key}: {value}" for key, value in rest.items())[:MAX_LABEL]
    return asked[:MAX_LABEL]


def text_of(content: Any) -> str:
    """Returns the text of message content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts: list[Json] = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    return "\n".join(str(part.get("text") or f"({part.get('type')})") for part in parts)
