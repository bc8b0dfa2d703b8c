"""Reads files for judging: our trajectories, OpenPipe ART's JSONL, plain {"messages": [...]} lines.

A file is read twice: first for its outline (groups and lines), then one group at a time while judging, so memory does
not grow with the texts. The keys of a line determine its format:

    {"id": .., "group_id": .., "group_size": .., "index": ..}       our trajectory (or scored trajectory)
    {"trajectories": [{"messages_and_choices": [..]}, ..]}          a group from ART
    {"messages": [..], "group_id": ..}                              a conversation; or ART's, with messages_and_choices

Other keys of a foreign line go to `metadata`, the reward goes to `returned_reward`. A line with an `error` is a failed
attempt. A line without a group invalidates the whole file, and the error names all such lines. Other errors in a line
are found when its group is loaded and affect only this group.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from art_cli.formats.imported_attempt import error_in, with_system
from art_cli.runs.durable import newer_schema
from art_cli.runs.json_lines import Line, decode, is_torn, lines, require_file
from art_cli.runs.trajectory import MAX_GROUP_SIZE, SCHEMA_VERSION, Json, Trajectory
from art_cli.runtime.errors import DataError, brief, printable

log = logging.getLogger(__name__)
_OWN = msgspec.json.Decoder(Trajectory)
_ANY = msgspec.json.Decoder(Json)
SHOWN_LINES = 5  # damaged lines that an error names after the first
Kind = Literal["own", "art", "plain"]  # our trajectories, a group from ART, or conversations


class _Head(msgspec.Struct):
    """Fields needed for the outline; other fields are skipped."""

    schema_version: int = SCHEMA_VERSION
    id: Any = None
    group_id: Any = None
    group_size: int | None = None
    index: int | None = None
    trajectories: list[msgspec.Raw] | None = None
    exceptions: list[msgspec.Raw] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    messages_and_choices: msgspec.Raw = msgspec.Raw()


class _History(msgspec.Struct):
    messages_and_choices: list[Json] = []


class _Foreign(msgspec.Struct):
    """Known fields of a foreign line."""

    id: str | int | None = None
    messages: list[Json] | None = None
    messages_and_choices: list[Json] | None = None
    additional_histories: list[_History] | None = None
    branches: list[list[Json]] | None = None
    tools: list[Json] | None = None
    reward: float | bool | None = None
    metrics: dict[str, float | bool | None] | None = None
    metadata: Json | None = None
    error: Any = None


class _ArtGroup(msgspec.Struct):
    trajectories: list[Json]
    exceptions: list[Json] | None = None


_HEAD = msgspec.json.Decoder(_Head)


@dataclass
class Group:
    """A group in the outline. Example, 2 of 4 attempts: Group("s1", "own", size=4, lines={0: (1, 0), 1: (2, 812)})."""

    group_id: str
    kind: Kind
    size: int  # expected number of trajectories
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> (line number, byte offset)
    count: int = 0  # present trajectories

    @property
    def is_complete(self) -> bool:
        return self.count == self.size

    @property
    def first_line(self) -> int:
        return min(number for number, _ in self.lines.values())


class TrajectoryFile:
    """A file's outline, with groups loaded on demand. Raises DataError with the line number for invalid lines.

    If a trajectory has several lines, the last one counts. The error describes the first invalid line and numbers the
    others, so that all can be mended at once.
    """

    def __init__(self, path: Path, *, group_by: str | None = None) -> None:
        require_file(path)
        self.path, self.group_by = path, group_by
        self.groups: dict[str, Group] = {}
        self._owners: dict[tuple[str, int], str] = {}  # (group, index) -> trajectory id
        damaged, first = list[int](), ""  # line numbers, and the first line's error
        for line in lines(path):
            if is_torn(line.data):
                log.warning("%s:%d: the last line is incomplete; skipped", path, line.number)
                break
            try:
                self._add(decode(line.data, _HEAD), line)
            except ValueError as error:
                damaged.append(line.number)
                first = first or str(error)
        if damaged:
            raise DataError(f"{first}; {_cure(damaged)}", path, damaged[0])

    def _add(self, head: _Head, line: Line) -> None:
        """Adds one line to its group. Raises ValueError for invalid lines."""
        if head.schema_version > SCHEMA_VERSION:
            raise ValueError(newer_schema(head.schema_version))
        if head.trajectories is not None:
            self._add_art_group(head, line)
        elif _is_own(head):
            self._add_own(head, line)
        else:
            group = self._open_group(self._find_group_id(head, line.data), "plain", size=0)
            group.lines[group.count] = (line.number, line.offset)
            group.size = group.count = len(group.lines)

    def _add_art_group(self, head: _Head, line: Line) -> None:
        size = len(head.trajectories or ()) + len(head.exceptions or ())
        if not size:
            log.warning("%s:%d: a group without trajectories; skipped", self.path, line.number)
            return
        group = self._open_group(f"line-{line.number}", "art", size=size)
        group.lines, group.count = {0: (line.number, line.offset)}, size

    def _add_own(self, head: _Head, line: Line) -> None:
        assert head.index is not None and head.group_size is not None
        if not isinstance(head.id, str) or not isinstance(head.group_id, str):
            raise ValueError('"id" and "group_id" of a trajectory are strings')
        if not 1 <= head.group_size <= MAX_GROUP_SIZE:
            raise ValueError(f'"group_size" is {brief(head.group_size)}, not between 1 and {MAX_GROUP_SIZE:,}')
        if not 0 <= head.index < head.group_size:
            raise ValueError(f'"index" is {brief(head.index)}, not between 0 and group_size - 1')
        group = self._open_group(head.group_id, "own", size=head.group_size)
        name = brief(group.group_id)
        if group.size != head.group_size:
            raise ValueError(f"group {name} has {group.size} attempts by an earlier line, {head.group_size} by this")
        owner = self._owners.setdefault((group.group_id, head.index), head.id)
        if owner != head.id:
            raise ValueError(f"place {head.index} of group {name} is {brief(owner)} already, not {brief(head.id)}")
        group.lines[head.index] = (line.number, line.offset)
        group.count = len(group.lines)

    def _open_group(self, name: str, kind: Kind, *, size: int) -> Group:
        """Returns the named group, creating it if needed. Raises ValueError on mixed formats."""
        group = self.groups.setdefault(name, Group(name, kind, size))
        if group.kind != kind or (kind == "art" and group.lines):
            raise ValueError(f"group {brief(name)} already exists in another format, in line {group.first_line}")
        return group

    def _find_group_id(self, head: _Head, line: bytes) -> str:
        if not bytes(head.messages) and not bytes(head.messages_and_choices):
            raise ValueError('expected a trajectory, an ART group, or {"messages": [...]}')
        key = self.group_by or "group_id"
        found = _select(decode(line, _ANY), key) if self.group_by else head.group_id
        if found is None or isinstance(found, dict | list):
            raise ValueError(f"no {key!r} to group by; name the key with --group-by")
        return str(found)

    def load(self, group: Group) -> list[Trajectory]:
        """Returns a group's trajectories, sorted by index. Raises DataError for invalid lines."""
        trajectories: list[Trajectory] = []
        names: set[str] = set()
        with self.path.open("rb") as file:
            for index, (number, offset) in sorted(group.lines.items()):
                file.seek(offset)
                try:
                    read = read_line(file.readline(), group, index)
                except (ValueError, RecursionError) as error:
                    raise DataError(_words(error), self.path, number) from error
                for trajectory in read:
                    if trajectory.id in names:
                        raise DataError(f"id {brief(trajectory.id)} is used twice in its group", self.path, number)
                    names.add(trajectory.id)
                trajectories += read
        return trajectories

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())


def _is_own(head: _Head) -> bool:
    return None not in (head.id, head.group_id, head.group_size, head.index)


def _cure(numbers: Sequence[int]) -> str:
    """Example: "mend the line, or remove it (also lines 7, 9 and 3 more)"."""
    others, more = numbers[1 : 1 + SHOWN_LINES], len(numbers) - 1 - SHOWN_LINES
    also = f" (also line{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
    end = f" and {more} more)" if more > 0 else ")" * bool(also)
    return f"mend the line, or remove it{also}{end}"


def _words(error: Exception) -> str:
    return "JSON is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))


def _select(record: Any, dotted: str) -> Any:
    """Returns `record["metadata"]["task"]` for "metadata.task", if present."""
    for key in dotted.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def read_line(line: bytes, group: Group, index: int) -> list[Trajectory]:
    """Returns the trajectories in a line; `index` is the first trajectory's index."""
    if group.kind == "own":
        trajectory = decode(line, _OWN)
        if (trajectory.group_id, trajectory.index) != (group.group_id, index):
            raise ValueError("the file was changed while it was read; run the same command again")
        return [trajectory]
    record = decode(line, _ANY)
    return _read_art_group(record, group) if group.kind == "art" else [_read_foreign(record, group, index)]


def _read_art_group(record: Json, group: Group) -> list[Trajectory]:
    """Returns an ART group's trajectories, then its exceptions as failed ones; all get the group's metadata."""
    found = msgspec.convert(record, _ArtGroup)
    about = {key: value for key, value in record.items() if key not in ("trajectories", "exceptions") and value}
    read = [_read_foreign(one, group, index) for index, one in enumerate(found.trajectories)]
    for trajectory in read if about else ():
        trajectory.metadata = trajectory.metadata | {"group": about}
    for index, failure in enumerate(found.exceptions or (), len(read)):
        error = f"{failure.get('type')}: {failure.get('message')}"
        read.append(_make_foreign(group, index, error=error))
    return read


def _read_foreign(record: Json, group: Group, index: int) -> Trajectory:
    """Converts a conversation or an ART trajectory. Raises msgspec.ValidationError for invalid types."""
    found = msgspec.convert(record, _Foreign)
    known = _Foreign.__struct_fields__
    rest = {key: value for key, value in record.items() if key not in known and value not in (None, [], {})}
    return _make_foreign(
        group,
        index,
        id=None if found.id is None else str(found.id),
        messages=with_system(_messages(found.messages_and_choices or found.messages or []), record.get("system")),
        branches=[
            *(_messages(history.messages_and_choices) for history in found.additional_histories or ()),
            *map(_messages, found.branches or ()),
        ],
        tools=found.tools or [],
        metrics={key: float(value) for key, value in (found.metrics or {}).items() if value is not None},
        metadata=(found.metadata or {}) | rest,
        returned_reward=None if found.reward is None else float(found.reward),
        error=error_in(record),
    )


def _make_foreign(group: Group, index: int, *, id: str | None = None, **fields: Any) -> Trajectory:
    name = id or f"{group.group_id}/{index}"
    return Trajectory(id=name, group_id=group.group_id, group_size=group.size, index=index, **fields)


def _messages(items: Sequence[Json]) -> list[Json]:
    """Replaces ART's recorded choices by their messages."""
    return [item["message"] if isinstance(item.get("message"), dict) else item for item in items]
