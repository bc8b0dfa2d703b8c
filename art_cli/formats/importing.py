"""Imports files from other tools: reads their records and writes a file of scored, grouped trajectories.

A file is JSON lines, a single JSON document, or a zip archive of JSON. All input is untrusted. Unreadable records are
counted by reason and do not affect other records.
"""

import contextlib
import importlib
import io
import os
import struct
import uuid
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from art_cli.formats import READ, READERS
from art_cli.formats.imported_attempt import TracedAttempt, TraceReader, length_of
from art_cli.runs import json_lines
from art_cli.runs.durable import new_file
from art_cli.runs.json_lines import MAX_LINE_BYTES
from art_cli.runs.trajectory import Json, ScoredTrajectory
from art_cli.runtime.errors import DataError, UsageError, describe, printable
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.scratch import make_directory, owner_only

MAX_DEPTH = 100  # nesting levels per record
MIN_ROOM, MAX_GROWTH = 2**16, 32  # minimum allowed characters per attempt, and maximum expansion relative to the record
MAX_ENTRIES = 1_000_000  # maximum archive entries
MAX_ARCHIVE_BYTES = 64 * 2**30  # total uncompressed archive size
CHUNK = 2**20
ZSTANDARD = 93  # zip compression method, supported by Python 3.14 and later
# Methods of zip that inspect uses. Others allocate memory requested by the archive.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, ZSTANDARD)
LISTS = ("data", "samples", "traces", "observations")  # keys of record lists in JSON documents
_ANY = msgspec.json.Decoder()
MAX_SCORES = 20  # displayed score names
MAX_REASONS = 5  # displayed reasons; others are only counted
WRONG = (ValueError, TypeError, OverflowError, RecursionError)  # possible errors while converting untrusted values
_SCORED = msgspec.json.Decoder(ScoredTrajectory)


class SourceRecord(NamedTuple):
    """A record, or the problem reading it. Example: SourceRecord("log.jsonl:3", None, "JSON is malformed: ...")"""

    origin: str
    record: Json | None
    problem: str = ""


def records(path: Path) -> Iterator[SourceRecord]:
    """Yields a file's records. Raises UsageError for a missing file, and DataError for a completely unreadable one."""
    json_lines.require_file(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        yield from _of_archive(path)
    elif words := json_lines.foreign_format(start):
        raise DataError(words, path)
    else:
        yield from _of_text(path)


# --- text -------------------------------------------------------------------------------------------------------------


def _of_text(path: Path) -> Iterator[SourceRecord]:
    """Reads a single JSON document if the first line is incomplete JSON and the file parses, else JSON lines."""
    is_first = True
    for number, line in _lines(path):
        origin = f"{path}:{number}"
        if line is None:
            yield SourceRecord(origin, None, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        elif is_first and _opens(line) and (whole := _whole(path)) is not None:
            yield from _found(whole, str(path))
            return
        elif line.rstrip().endswith(b"},"):  # copied from a list
            yield from _parsed(line.rstrip()[:-1], origin)
        elif json_lines.is_torn(line):
            yield SourceRecord(origin, None, "the last line is half-written")
        else:
            yield from _parsed(line, origin)
        is_first = False


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, line) for nonblank lines, with None instead of an overlong line."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(CHUNK)
                yield number, None
            elif line.strip():
                yield number, line


def _opens(line: bytes) -> bool:
    """Returns whether a line is only the start of an indented JSON document."""
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    return text in (b"[", b"{") or (text[:1] in b"[{" and text[-1:] in b"[{,")


def _whole(path: Path) -> Any:
    """Returns the whole file as one JSON value, or None if it is too large or no single value."""
    if path.stat().st_size > MAX_LINE_BYTES:
        return None
    with contextlib.suppress(ValueError, MemoryError):
        return json_lines.decode(path.read_bytes(), _ANY)
    return None


def _parsed(text: bytes, origin: str) -> Iterator[SourceRecord]:
    try:
        value = json_lines.decode(text, _ANY)
    except (ValueError, MemoryError) as error:
        yield SourceRecord(origin, None, str(error) or "too large for the memory")
        return
    yield from _found(value, origin)


def _found(value: Any, origin: str) -> Iterator[SourceRecord]:
    """Yields the records in a value: the value itself, list items, or envelope items."""
    if isinstance(value, dict | list) and is_deep(value, MAX_DEPTH):
        yield SourceRecord(origin, None, "JSON is nested too deeply")
        return
    items = value if isinstance(value, list) else _enveloped(value)
    found: Iterable[tuple[str, Any]] = [(origin, value)]
    if items is not None:
        found = ((f"{origin}, item {number}", item) for number, item in enumerate(items, 1))
    for name, item in found:
        is_record = isinstance(item, dict)
        yield SourceRecord(name, item if is_record else None, "" if is_record else "not a JSON object")


def _enveloped(value: Any) -> list[Any] | None:
    """Returns the items of {"data": [...]} and similar envelopes. Objects with record keys are not envelopes."""
    if not isinstance(value, dict) or "id" in value or "messages" in value:
        return None
    return next((value[key] for key in LISTS if isinstance(value.get(key), list)), None)


# --- archives ---------------------------------------------------------------------------------------------------------


def _of_archive(path: Path) -> Iterator[SourceRecord]:
    """Yields the JSON entries under `samples/` in a zip archive written by inspect."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"a damaged zip archive: {describe(error)}", path) from None
    with archive, path.open("rb") as file:
        entries = [entry for entry in archive.infolist() if entry.filename.startswith("samples/")]
        if not entries:
            raise DataError("a zip archive without samples/; only .eval files of inspect are read", path)
        if len(entries) > MAX_ENTRIES:
            raise DataError(f"a zip archive of {len(entries)} entries; at most {MAX_ENTRIES} are read", path)
        left = MAX_ARCHIVE_BYTES
        for entry in entries:
            origin = f"{path}, {entry.filename[:200]}"
            try:
                text = _unpacked(archive, entry, file, min(MAX_LINE_BYTES, left))
            except (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError) as error:
                yield SourceRecord(origin, None, f"it cannot be unpacked: {describe(error)}")
                continue
            if text is None:
                yield SourceRecord(origin, None, f"it unpacks to more than {MAX_LINE_BYTES >> 20} MiB")
                continue
            left -= len(text)
            yield from _parsed(text, origin)


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file: IO[bytes], limit: int) -> bytes | None:
    """Returns an entry's content, unless it is larger than `limit`."""
    if entry.compress_type not in METHODS:
        raise ValueError(f"packed by method {entry.compress_type} of zip, which inspect does not use")
    if entry.compress_type == ZSTANDARD:
        text = _read_zstandard(entry, file, limit + 1)
    else:
        with archive.open(entry) as stream:
            text = stream.read(limit + 1)
    return text if len(text) <= limit else None


def _read_zstandard(entry: zipfile.ZipInfo, file: IO[bytes], limit: int) -> bytes:
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ImportError:
        raise ValueError("it is packed with zstandard: pip install 'art-cli[data]'") from None
    file.seek(entry.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))  # lengths of the name and extra fields after the header
    file.seek(name + extra, io.SEEK_CUR)
    packed = file.read(min(entry.compress_size, MAX_LINE_BYTES))
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
        read: bytes = stream.read(limit)
    return read


@dataclass
class Unread:
    """Unreadable records by reason, each reason with an example origin. str() gives a single line."""

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
    num_records: int = 0
    num_below: int = 0  # attempts below the minimum reward
    num_with_tokens: int = 0
    num_rewarded: int = 0
    num_failed: int = 0  # attempts with errors
    scores: set[str] = field(default_factory=set)  # metric names of attempts without a reward
    num_other_temperatures: int = 0  # attempts with tokens sampled at a temperature other than 1
    formats: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)  # group -> size
    places: dict[str, list[int]] = field(default_factory=dict)  # group -> original attempt indexes
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
    """Imports `paths` into `output`. `form` is the format of all records; None detects the format per record.

    `group_by` is the dotted record key with the scenario id. `reward` is the metric to use as reward. Attempts below
    `min_reward` are skipped. Raises UsageError if `output` exists, DataError for missing files or if no record is
    readable.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output}: already exists; name another file")
    done = Imported()
    make_directory(output.parent)
    spool = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.spool")
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
        _write_groups(spool, output, done)
    finally:
        spool.unlink(missing_ok=True)
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
    """Yields complete trajectories, each with the JSON line. Invalid attempts are counted in `done`."""
    readers = [reader() for reader in READERS]
    ids: set[tuple[str, str]] = set()
    for origin, attempt in _attempts(paths, readers, done, form=form, group_by=group_by):
        try:
            if reward is not None:
                attempt.reward = (attempt.metrics if attempt.whole is None else attempt.whole.metrics).get(reward)
                if attempt.whole is not None:
                    attempt.whole.returned_reward = attempt.reward
            line = msgspec.json.encode(attempt.trajectory())
            trajectory = _SCORED.decode(line)  # checks that the line can be read back
            key = (trajectory.group_id, trajectory.id)
            if trajectory.id and key in ids:
                raise ValueError("an attempt with this id was already read")
        except WRONG as error:
            done.unread.add(origin, _why(error))
            continue
        ids.add(key)
        yield trajectory, line


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
                attempt = reader.read(record, _group_of(record, group_by, is_part=reader.joins))
                if attempt is not None and reader.joins:
                    _check_grouped(attempt, group_by)
                if attempt is not None and attempt.length > MIN_ROOM + MAX_GROWTH * length_of(record):
                    raise ValueError(f"its conversations are more than {MAX_GROWTH} times as long as the record")
            except WRONG as error:
                done.unread.add(origin, _why(error))
                continue
            done.formats[reader.name] += 1
            if attempt is not None:
                yield origin, attempt
    for reader in readers:
        for attempt in reader.finish():
            origin = f"attempt {printable(attempt.id or attempt.scenario, limit=80)}"
            try:
                _check_grouped(attempt, group_by)
            except ValueError as error:
                done.unread.add(origin, _why(error))
            else:
                yield origin, attempt


def _check_grouped(attempt: TracedAttempt, group_by: str | None) -> None:
    """Raises ValueError if none of the attempt's records has the key to group by."""
    if group_by is not None and not attempt.is_grouped:
        raise ValueError(f"no {group_by!r} to group by")


def _why(error: Exception) -> str:
    return "JSON is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _reader_of(record: Json, readers: Sequence[TraceReader], form: str | None) -> TraceReader:
    if form is not None:
        return next(reader for reader in readers if reader.name == form)
    for reader in readers:
        if reader.recognises(record):
            return reader
    raise ValueError(f"no known format ({', '.join(READ)}); --from names one")


def _group_of(record: Json, group_by: str | None, *, is_part: bool) -> str | None:
    """Returns the dotted key's value. Raises ValueError if it is missing, unless another record may have it."""
    if group_by is None:
        return None
    value: Any = record
    for key in group_by.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str | int) or value == "":
        if is_part:
            return None
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


def _write_groups(spool: Path, output: Path, done: Imported) -> None:
    """Copies the trajectories and sets index and group size, which are only known after reading everything."""
    indexes: defaultdict[str, int] = defaultdict(int)
    ranks = {  # group -> original index -> rank; empty if original indexes repeat
        group: {index: rank for rank, index in enumerate(sorted(places))} if len(set(places)) == len(places) else {}
        for group, places in done.places.items()
    }
    with open(spool, "rb") as file, new_file(output) as out:
        for line in file:
            trajectory = _SCORED.decode(line)
            # the order of a file exported by art is kept
            trajectory.index = ranks[trajectory.group_id].get(trajectory.index, indexes[trajectory.group_id])
            trajectory.group_size = done.groups[trajectory.group_id]
            trajectory.id = trajectory.id or f"{trajectory.group_id}/{trajectory.index}"
            indexes[trajectory.group_id] += 1
            out.write(msgspec.json.encode(trajectory) + b"\n")
