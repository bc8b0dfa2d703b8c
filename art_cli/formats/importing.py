"""Reads files of other tools and writes one file of scored trajectories, in groups; counts what it could not read."""

import contextlib
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from art_cli.formats import READ, READERS, TraceReader
from art_cli.formats.imported_attempt import TracedAttempt
from art_cli.formats.trace_source import records
from art_cli.runs.trajectory import Json, ScoredTrajectory
from art_cli.runtime.errors import DataError, UsageError, printable
from art_cli.runtime.permissions import make_directory, owner_only

MAX_SCORES = 20  # names of scores that are shown
MAX_REASONS = 5  # different reasons that are shown; the others are counted
WRONG = (ValueError, TypeError, OverflowError, RecursionError)  # errors of converting a hostile value
_SCORED = msgspec.json.Decoder(ScoredTrajectory)


@dataclass
class Unread:
    """Records that were not read, by reason, each with the first origin. str: one line."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, origin: str, reason: str) -> None:
        reason = printable(reason, limit=200)
        self.counts[reason] += 1
        self.first.setdefault(reason, origin)

    def __str__(self) -> str:
        """Example: "2 JSON is malformed: ... (a.jsonl:7 first)"."""
        told = [f"{count} {reason} ({self.first[reason]})" for reason, count in self.counts.most_common(MAX_REASONS)]
        left = self.counts.total() - sum(count for _, count in self.counts.most_common(MAX_REASONS))
        return "; ".join([*told, *([f"{left} for other reasons"] if left else [])])


@dataclass
class Imported:
    """The counts of an import: what it wrote, and what it did not."""

    num_records: int = 0
    num_below: int = 0  # attempts below the lowest reward that was asked for
    num_with_tokens: int = 0
    num_rewarded: int = 0
    num_failed: int = 0  # attempts with an error
    scores: set[str] = field(default_factory=set)  # names of numbers of attempts without a reward
    num_other_temperatures: int = 0  # attempts with tokens that were not sampled at temperature 1
    formats: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)  # group -> its size
    places: dict[str, list[int]] = field(default_factory=dict)  # group -> places of its attempts where they come from
    unread: Unread = field(default_factory=Unread)

    @property
    def num_attempts(self) -> int:
        return self.groups.total()


def import_files(
    paths: Sequence[Path],
    output: Path,
    *,
    form: str | None = None,
    group_by: str | None = None,
    reward: str | None = None,
    min_reward: float | None = None,
) -> Imported:
    """Writes `output` from the files. `form` is the format of all records, or None if each is recognised.

    `group_by` is the dotted key of a record that names its scenario, and `reward` the metric that is the reward. Only
    attempts with at least `min_reward` are written. Raises UsageError if `output` is there already, DataError if there
    is no file of that name, or no record could be read.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output}: it is there already; name another file")
    done = Imported()
    make_directory(output.parent)
    spool, beside = (output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.{end}") for end in ("spool", "tmp"))
    try:
        with open(spool, "wb", opener=owner_only) as file:
            for trajectory, line in _trajectories(paths, done, form=form, group_by=group_by, reward=reward):
                if min_reward is not None and not (trajectory.reward is not None and trajectory.reward >= min_reward):
                    done.num_below += 1
                    continue
                _count(done, trajectory)
                file.write(line + b"\n")
        if not done.num_attempts:
            raise DataError(_nothing(done, min_reward), ", ".join(map(str, paths)))
        _write_groups(spool, beside, done)
        beside.replace(output)
    finally:
        for path in (spool, beside):
            path.unlink(missing_ok=True)
    return done


def _nothing(done: Imported, min_reward: float | None) -> str:
    if done.num_below:
        return f"no attempt has a reward of {min_reward:g} or more; {done.num_below} have less or none"
    if not done.num_records:
        return "no records in it"
    return f"none of {done.num_records} records could be read: {done.unread}"


def _trajectories(
    paths: Sequence[Path], done: Imported, *, form: str | None, group_by: str | None, reward: str | None
) -> Iterator[tuple[ScoredTrajectory, bytes]]:
    """Yields the trajectories of all records, each with its line, as soon as it is whole. A wrong one is counted in
    `done`."""
    readers = [reader() for reader in READERS]
    ids: set[tuple[str, str]] = set()
    for origin, attempt in _attempts(paths, readers, done, form=form, group_by=group_by):
        try:
            if reward is not None:
                attempt.reward = _named(attempt, reward)
            line = msgspec.json.encode(attempt.trajectory())
            trajectory = _SCORED.decode(line)  # a check: the written line can be read
            key = (trajectory.group_id, trajectory.id)
            if trajectory.id and key in ids:
                raise ValueError("an attempt that was read before: its id is there already")
        except WRONG as error:
            done.unread.add(origin, _why(error))
            continue
        ids.add(key)
        yield trajectory, line


def _named(attempt: TracedAttempt, reward: str) -> float | None:
    return (attempt.whole.metrics if attempt.whole is not None else attempt.metrics).get(reward)


def _attempts(
    paths: Sequence[Path], readers: Sequence[TraceReader], done: Imported, *, form: str | None, group_by: str | None
) -> Iterator[tuple[str, TracedAttempt]]:
    for path in paths:
        for origin, record, problem in records(path):
            done.num_records += 1
            if record is None:
                done.unread.add(origin, problem)
                continue
            try:
                reader = _reader_of(record, readers, form)
                attempt = reader.read(record, _group_of(record, group_by))
            except WRONG as error:
                done.unread.add(origin, _why(error))
                continue
            done.formats[reader.name] += 1
            if attempt is not None:
                yield origin, attempt
    for reader in readers:
        for attempt in reader.finish():
            yield f"attempt {printable(attempt.id or attempt.scenario, limit=80)}", attempt


def _why(error: Exception) -> str:
    return "JSON is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _reader_of(record: Json, readers: Sequence[TraceReader], form: str | None) -> TraceReader:
    if form is not None:
        return next(reader for reader in readers if reader.name == form)
    for reader in readers:
        if reader.recognises(record):
            return reader
    raise ValueError(f"no known format ({', '.join(READ)}); --from names one")


def _group_of(record: Json, group_by: str | None) -> str | None:
    """Returns the value of the dotted key. Raises ValueError if there is no such key."""
    if group_by is None:
        return None
    value: Any = record
    for key in group_by.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"no {group_by!r} to group by")
    return str(value)


def _count(done: Imported, trajectory: ScoredTrajectory) -> None:
    done.groups[trajectory.group_id] += 1
    done.places.setdefault(trajectory.group_id, []).append(trajectory.index)
    done.num_with_tokens += bool(trajectory.turns)
    done.num_rewarded += trajectory.reward is not None
    if trajectory.reward is None and trajectory.error is None and len(done.scores) < MAX_SCORES:
        done.scores.update(trajectory.metrics)
    done.num_failed += trajectory.error is not None
    done.num_other_temperatures += any(turn.temperature != 1.0 for turn in trajectory.turns)


def _write_groups(spool: Path, beside: Path, done: Imported) -> None:
    """Copies the trajectories, each with its place in its group, because a group's size is known only now."""
    indexes: defaultdict[str, int] = defaultdict(int)
    with open(spool, "rb") as file, open(beside, "wb", opener=owner_only) as out:
        for line in file:
            trajectory = _SCORED.decode(line)
            places = done.places[trajectory.group_id]
            is_placed = len(set(places)) == len(places)  # ours, which keep their order
            trajectory.index = sorted(places).index(trajectory.index) if is_placed else indexes[trajectory.group_id]
            trajectory.group_size = done.groups[trajectory.group_id]
            trajectory.id = trajectory.id or f"{trajectory.group_id}/{trajectory.index}"
            indexes[trajectory.group_id] += 1
            out.write(msgspec.json.encode(trajectory) + b"\n")
        out.flush()
        with contextlib.suppress(OSError):
            os.fsync(out.fileno())
