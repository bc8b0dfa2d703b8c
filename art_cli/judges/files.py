"""Reads the files that can be judged: our trajectories, ART's own JSONL, plain {"messages": [...]} lines.

A file is read twice: once for its outline (which groups, which lines), then group by group as they are judged, so that
memory does not grow with the file's texts. A line says what it is by its keys:

    {"id": .., "group_id": .., "group_size": .., "index": ..}       a trajectory of ours (or a scored one)
    {"trajectories": [{"messages_and_choices": [..]}, ..]}          a group of ART's
    {"messages": [..], "group_id": ..}                              a conversation; or ART's, with messages_and_choices

What a foreign line says besides is kept in `metadata`, its reward in `returned_reward`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from art_cli.errors import DataError, UsageError
from art_cli.trajectory import SCHEMA_VERSION, Json, Trajectory

_OWN_KEYS = ("id", "group_id", "group_size", "index")


class _Head(msgspec.Struct):
    """As much of a line as its place in the outline needs; the rest is passed over."""

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
    """What a line that is not ours may say in words we know."""

    id: str | int | None = None
    messages: list[Json] | None = None
    messages_and_choices: list[Json] | None = None
    additional_histories: list[_History] | None = None
    tools: list[Json] | None = None
    reward: float | None = None
    metrics: dict[str, float | bool] | None = None
    metadata: Json | None = None


class _ArtGroup(msgspec.Struct):
    trajectories: list[Json]
    exceptions: list[Json] | None = None


@dataclass
class Group:
    """One group of the outline. Example: Group("s1", size=4, lines={0: (1, 0), 1: (2, 812)}): two of four are there."""

    group_id: str
    size: int  # how many trajectories it should have
    lines: dict[int, tuple[int, int]] = field(default_factory=dict)  # place -> (line number, byte offset)
    count: int = 0  # how many it has

    @property
    def is_complete(self) -> bool:
        return self.count == self.size


class TrajectoryFile:
    """The outline of a file, and its groups on demand. Raises DataError with the line for what cannot be read.

    Of a place written twice by the same trajectory the last line counts.
    """

    def __init__(self, path: Path, *, group_by: str | None = None) -> None:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        self.path, self.group_by = path, group_by
        self.groups: dict[str, Group] = {}
        self._read_outline()

    def _read_outline(self) -> None:
        head = msgspec.json.Decoder(_Head)
        owners: dict[tuple[str, int], str] = {}  # (group, place in it) -> id of the trajectory
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                try:
                    outline = head.decode(line)
                except msgspec.DecodeError as error:
                    if not line.endswith(b"\n") and not isinstance(error, msgspec.ValidationError):
                        return  # torn: its writer was killed, and what it held is owed by whoever wrote it
                    raise DataError(str(error), self.path, number) from error
                try:
                    self._place(outline, line, (number, start), owners)
                except ValueError as error:
                    raise DataError(str(error), self.path, number) from error

    def _place(self, head: _Head, line: bytes, where: tuple[int, int], owners: dict[tuple[str, int], str]) -> None:
        """Puts one line into its group. Raises ValueError with what is wrong with it."""
        if head.schema_version > SCHEMA_VERSION:
            message = f"written by a newer art (schema {head.schema_version}, this one reads up to {SCHEMA_VERSION})"
            raise ValueError(f"{message}; upgrade art")
        if head.trajectories is not None:
            name = f"line-{where[0]}"
            size = len(head.trajectories) + len(head.exceptions or ())
            self.groups[name] = Group(name, size, {0: where}, count=size)
            return
        if _is_own(head):
            assert head.index is not None and head.group_size is not None
            group = self.groups.setdefault(str(head.group_id), Group(str(head.group_id), head.group_size))
            owner = owners.setdefault((group.group_id, head.index), str(head.id))
            if owner != str(head.id):
                raise ValueError(
                    f"place {head.index} of group {group.group_id!r} is {owner!r} already, not {head.id!r}"
                )
            group.lines[head.index] = where
        else:
            name = self._find_group_id(head, line)
            group = self.groups.setdefault(name, Group(name, 0))
            group.lines[group.count] = where
            group.size = len(group.lines)
        group.count = len(group.lines)

    def _find_group_id(self, head: _Head, line: bytes) -> str:
        if not bytes(head.messages) and not bytes(head.messages_and_choices):
            raise ValueError('expected a trajectory, an ART group, or {"messages": [...]}')
        key = self.group_by or "group_id"
        found = _select(json.loads(line), key)
        if found is None or isinstance(found, dict | list):
            raise ValueError(f"no {key!r} to group by; name the key with --group-by")
        return str(found)

    def load(self, group: Group) -> list[Trajectory]:
        """The trajectories of one group, in order of place."""
        trajectories: list[Trajectory] = []
        names: set[str] = set()
        with self.path.open("rb") as file:
            for place, (number, offset) in sorted(group.lines.items()):
                file.seek(offset)
                try:
                    read = _read(file.readline(), group, place)
                except msgspec.DecodeError as error:
                    raise DataError(str(error), self.path, number) from error
                for trajectory in read:
                    if trajectory.id in names:
                        raise DataError(f"id {trajectory.id!r} is used twice in its group", self.path, number)
                    names.add(trajectory.id)
                trajectories += read
        return trajectories

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())


def _is_own(head: _Head) -> bool:
    return all(getattr(head, key) is not None for key in _OWN_KEYS)


def _select(record: Any, dotted: str) -> Any:
    """`record["metadata"]["task"]` for "metadata.task"; None where there is none."""
    for key in dotted.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _read(line: bytes, group: Group, index: int) -> list[Trajectory]:
    """The trajectories of one line; `index` is the place of the first, where the line does not say."""
    record = msgspec.json.decode(line)
    if all(record.get(key) is not None for key in _OWN_KEYS):
        return [msgspec.json.decode(line, type=Trajectory)]
    if "trajectories" in record:
        return _read_art_group(record, group)
    return [_read_foreign(record, group, index)]


def _read_art_group(record: Json, group: Group) -> list[Trajectory]:
    """An ART group: its trajectories, then its exceptions as trajectories with an error; its metadata goes to each."""
    found = msgspec.convert(record, _ArtGroup)
    about = {key: value for key, value in record.items() if key not in ("trajectories", "exceptions") and value}
    read = [_read_foreign(one, group, index) for index, one in enumerate(found.trajectories)]
    for trajectory in read if about else ():
        trajectory.metadata = trajectory.metadata | {"group": about}
    for index, failure in enumerate(found.exceptions or (), len(read)):
        error = f"{failure.get('type')}: {failure.get('message')}"
        read.append(_place_foreign(group, index, error=error))
    return read


def _read_foreign(record: Json, group: Group, index: int) -> Trajectory:
    """A plain conversation, or one of ART's trajectories. Raises msgspec.ValidationError for fields of a wrong type."""
    found = msgspec.convert(record, _Foreign)
    known = _Foreign.__struct_fields__
    rest = {key: value for key, value in record.items() if key not in known and value not in (None, [], {})}
    return _place_foreign(
        group,
        index,
        id=None if found.id is None else str(found.id),
        messages=_messages(found.messages_and_choices or found.messages or []),
        branches=[_messages(history.messages_and_choices) for history in found.additional_histories or ()],
        tools=found.tools or [],
        metrics={key: float(value) for key, value in (found.metrics or {}).items()},
        metadata=(found.metadata or {}) | rest,
        returned_reward=found.reward,
    )


def _place_foreign(group: Group, index: int, *, id: str | None = None, **fields: Any) -> Trajectory:
    name = id or f"{group.group_id}/{index}"
    return Trajectory(id=name, group_id=group.group_id, group_size=group.size, index=index, **fields)


def _messages(items: Sequence[Json]) -> list[Json]:
    """Messages; of ART's recorded choices, the message inside."""
    return [item["message"] if isinstance(item.get("message"), dict) else item for item in items]
