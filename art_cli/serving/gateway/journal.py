"""Journal: the files of one gateway's directory, for writing and for reading.

    lock                                   held by the process that writes here
    calls-20261122-195028.jsonl            the journal: a line for each answered call, appended before its answer ends
    trajectories-20261122-195028.jsonl     what became of that journal: one trajectory per line, group after group

A journal is the only record of what was answered. Rotation begins a new one, writes the conversations of the old one
that are over as a file of trajectories, copies the calls of the others to the new one, and removes the old one:

    begin the new journal  ->  write the trajectories beside their place and rename them  ->  copy  ->  remove

So a conversation becomes a trajectory once, at whichever point the process is killed: a journal beside its file of
trajectories still owes the copy, and an older journal without one is copied whole. A call that was copied twice counts
once, because its number in its conversation is the same.
"""

import asyncio
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.runs import json_lines
from art_cli.runs.durable import LineWriter, lock_directory, newer_schema, sync_directory, write_lines
from art_cli.runs.trajectory import SCHEMA_VERSION, Trajectory
from art_cli.runtime.errors import DataError
from art_cli.runtime.scratch import make_directory
from art_cli.serving.gateway.entries import Head, JournalEntry
from art_cli.serving.gateway.journaled_recorder import places, trajectory_of

log = logging.getLogger(__name__)

CALLS, TRAJECTORIES = "calls", "trajectories"
NAME = re.compile(r"(calls|trajectories)-(\d{8}-\d{6})\.jsonl")
STAMP = "%Y%m%d-%H%M%S"
MIN_FREE = 64 * 2**20  # free bytes on the disk below which no call is taken, because its answer might not be recorded
RETRY_S = "30"

_HEAD = msgspec.json.Decoder(Head)
_ENTRY = msgspec.json.Decoder(JournalEntry)


class WrittenFile(NamedTuple):
    """One file of trajectories. Example: WrittenFile(Path("trajectories-20261122-195028.jsonl"), 120, num_exact=118)"""

    path: Path
    num: int
    num_exact: int  # trajectories in which every call has token ids and logprobs


class _Line(NamedTuple):
    """The position of one entry."""

    offset: int
    length: int
    at: float


class Outline(NamedTuple):
    """The conversations of a journal. `lines`: conversation -> number -> position of that entry."""

    path: Path
    lines: dict[str, dict[int, _Line]]
    scenarios: dict[str, str]

    def last_at(self, conversation: str) -> float:
        return max(line.at for line in self.lines[conversation].values())

    def read(self, conversation: str) -> list[JournalEntry]:
        """Returns the entries of a conversation in the order of their numbers, up to the first one that is missing.

        Raises DataError: a line is no entry.
        """
        entries = []
        with self.path.open("rb") as file:
            for expected, (number, line) in enumerate(sorted(self.lines[conversation].items())):
                if number != expected:
                    log.warning("%s: entry %d of %s is missing", self.path, expected, conversation)
                    break
                file.seek(line.offset)
                try:
                    entries.append(json_lines.decode(file.read(line.length), _ENTRY))
                except ValueError as error:
                    raise DataError(str(error), self.path) from error
        return entries

    def copy(self, conversations: Iterable[str]) -> Iterator[tuple[str, list[msgspec.Raw]]]:
        """Yields the lines of each conversation, as they are."""
        with self.path.open("rb") as file:
            for conversation in conversations:
                lines = []
                for line in self.lines[conversation].values():
                    file.seek(line.offset)
                    lines.append(msgspec.Raw(file.read(line.length).rstrip(b"\n")))
                yield conversation, lines


class _Retired(NamedTuple):
    """A journal that is being made trajectories of."""

    path: Path
    open: frozenset[str]  # conversations that go on in the new journal
    copied: set[str]  # those of them that are there already


class Journal:
    """Use it as `with Journal(...) as journal`. A file of trajectories is due at `rotate_bytes` of calls, or when the
    oldest call is `rotate_s` seconds old."""

    def __init__(self, directory: Path, *, group_size: int, rotate_bytes: float, rotate_s: float) -> None:
        self.directory, self._group_size = directory, group_size
        self._rotate_bytes, self._rotate_s = rotate_bytes, rotate_s
        self._writer: LineWriter
        self._retired: _Retired | None = None
        self._conversations: set[str] = set()  # those that have entries in the current journal
        self._num_bytes = 0  # size of the new calls in the current journal
        self._first_at: float | None = None  # when the first of them was made
        self._num_appended = self._num_synced = 0
        self._syncing: asyncio.Task[None] | None = None
        self._folding = threading.Lock()  # a rotation may still run in its thread when the gateway stops
        self._stack = ExitStack()
        self.written: list[WrittenFile] = []  # the files of trajectories since it was opened

    def __enter__(self) -> Self:
        """Raises RunError: another process writes here; DataError: a file of it cannot be read."""
        make_directory(self.directory)
        with ExitStack() as stack:
            stack.enter_context(lock_directory(self.directory, self.directory / "lock"))
            for path in self.directory.glob(f".{TRAJECTORIES}-*.tmp"):  # a writer left it that was killed
                path.unlink(missing_ok=True)
            self._recover()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()
        self._stack.close()

    # --- appending ----------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises ChatError 503: the disk is all but full, so that an answer might not be recorded."""
        free = shutil.disk_usage(self.directory).free
        if free < MIN_FREE:
            raise _unwritable(f"only {free >> 20} MB are free on its disk")

    def append(self, entry: JournalEntry) -> int:
        """Writes the line to the system, and returns its length. Raises ChatError 503 if that fails."""
        line = msgspec.json.encode(entry)
        try:
            self._writer.append(msgspec.Raw(line))
        except (OSError, ValueError) as error:  # ValueError: it was closed, because the gateway has stopped
            reason = getattr(error, "strerror", None) or str(error)
            log.error("%s: a call is not recorded: %s", self._writer.path, reason)
            raise _unwritable(reason) from error
        self._num_appended += 1
        self._num_bytes += len(line)
        self._first_at = entry.at if self._first_at is None else self._first_at
        self._conversations.add(entry.conversation)
        return len(line)

    async def sync(self) -> None:
        """Returns when all that was appended before is on the disk. Raises ChatError 503: the disk does not take it.

        Calls that wait at the same time share one write.
        """
        needed = self._num_appended
        while self._num_synced < needed:
            if self._syncing is None or self._syncing.done():
                self._syncing = asyncio.create_task(self._sync())
            try:
                await asyncio.shield(self._syncing)
            except OSError as error:
                log.error("%s: %s", self._writer.path, error.strerror or error)
                raise _unwritable(error.strerror or str(error)) from error

    async def _sync(self) -> None:
        num, writer = self._num_appended, self._writer
        await asyncio.to_thread(writer.sync)
        self._num_synced = max(self._num_synced, num)

    # --- rotation -----------------------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Returns whether to write a file of trajectories: by size or age, or because that failed before."""
        if self._retired is not None:
            return True
        is_old = self._first_at is not None and now - self._first_at >= self._rotate_s
        return self._num_bytes >= self._rotate_bytes or is_old

    async def rotate(self, open_conversations: AbstractSet[str]) -> None:
        """Makes trajectories of all conversations but the open ones, if there are any.

        Raises OSError: the disk does not take them. What is missing is made by the next call.
        """
        if self._retired is None:
            if self._conversations <= open_conversations:
                return
            while self._syncing is not None and not self._syncing.done():  # it uses the writer that is closed here
                await asyncio.wait((self._syncing,))
            self._writer.sync()
            self._num_synced = self._num_appended
            retired, old = _Retired(self._writer.path, frozenset(open_conversations), set()), self._writer
            self._begin()
            old.close()
            self._retired = retired
        await asyncio.to_thread(self._end_retired)

    def finish(self) -> None:
        """Makes trajectories of everything. Raises OSError: the disk does not take them; the next start makes them."""
        self._end_retired()
        self._writer.close()
        with self._folding:
            self._fold(_Retired(self._writer.path, frozenset(), set()), None)

    def _end_retired(self) -> None:
        with self._folding:
            if self._retired is not None:
                self._fold(self._retired, self._writer)
                self._retired = None

    def _fold(self, retired: _Retired, new: LineWriter | None) -> None:
        outline = _outline(retired.path)
        target = _beside(retired.path, TRAJECTORIES)
        if not target.exists():
            over = {name: outline.scenarios[name] for name in outline.lines if name not in retired.open}
            if over:
                self._write(outline, over, target)
        if new is not None:
            for name, lines in outline.copy([n for n in outline.lines if n in retired.open - retired.copied]):
                new.append_all(lines)
                retired.copied.add(name)
                self._conversations.add(name)
            new.sync()
            self._first_at = self._first_at or (time.time() if retired.copied else None)
        retired.path.unlink()

    def _write(self, outline: Outline, scenarios: Mapping[str, str], target: Path) -> None:
        found = places(scenarios, group_size=self._group_size, file=_stamp(target))
        num_exact = 0

        def trajectories() -> Iterator[Trajectory]:
            nonlocal num_exact
            for name, place in found.items():
                trajectory = trajectory_of(outline.read(name), place)
                num_exact += trajectory.metadata["text_only_calls"] == 0
                yield trajectory

        write_lines(target, trajectories())
        self.written.append(WrittenFile(target, len(found), num_exact))
        log.info("%s: %d trajectories, %d of them exact", target, len(found), num_exact)

    def _begin(self) -> None:
        """Begins a journal that is younger than every file here."""
        latest = max((_stamp(path) for path in self._files(CALLS, TRAJECTORIES)), default="")
        now = datetime.now(UTC)
        if latest and now.strftime(STAMP) <= latest:  # rotated twice within a second, or the clock was set back
            now = datetime.strptime(latest, STAMP).replace(tzinfo=UTC) + timedelta(seconds=1)
        self._open(self.directory / f"{CALLS}-{now.strftime(STAMP)}.jsonl")

    def _open(self, path: Path) -> None:
        self._writer = LineWriter(path)
        sync_directory(path.parent)
        self._conversations, self._num_bytes, self._first_at = set(), 0, None

    # --- after a kill -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Ends what a killed process had begun, and opens the journal that it wrote last."""
        older = sorted(self._files(CALLS))
        if older and not _beside(older[-1], TRAJECTORIES).exists():
            self._open(older.pop())
        else:
            self._begin()
        for path in older:
            self._take_over(path)
        outline = self.outline()
        lines = [line for each in outline.lines.values() for line in each.values()]
        self._conversations = set(outline.lines)
        self._first_at = min((line.at for line in lines), default=None)
        self._num_bytes = sum(line.length for line in lines)

    def _take_over(self, path: Path) -> None:
        """Copies what an older journal still holds to the current one, and removes it."""
        done = _ids(_beside(path, TRAJECTORIES))
        outline = _outline(path)
        here = self.outline().lines
        owed = [name for name in outline.lines if name not in done]
        for name, lines in outline.copy(owed):
            if not outline.lines[name].keys() <= here.get(name, {}).keys():
                self._writer.append_all(lines)
        self._writer.sync()
        path.unlink()

    def outline(self) -> Outline:
        """Returns the conversations of the current journal."""
        return _outline(self._writer.path)

    def _files(self, *kinds: str) -> Iterator[Path]:
        for path in self.directory.iterdir():
            if (found := NAME.fullmatch(path.name)) and found[1] in kinds:
                yield path


def _outline(path: Path) -> Outline:
    """Raises DataError: a line that is not the last one is no entry."""
    lines: dict[str, dict[int, _Line]] = {}
    scenarios: dict[str, str] = {}
    for line in json_lines.lines(path):
        if json_lines.is_torn(line.data):
            break
        try:
            head = json_lines.decode(line.data, _HEAD)
        except ValueError as error:
            raise DataError(str(error), path, line.number) from error
        if head.schema_version > SCHEMA_VERSION:
            raise DataError(newer_schema(head.schema_version), path, line.number)
        own = lines.setdefault(head.conversation, {})
        own.setdefault(head.number, _Line(line.offset, len(line.data), head.at))
        scenarios.setdefault(head.conversation, head.scenario)
    return Outline(path, lines, scenarios)


class _Id(msgspec.Struct):
    id: str


def _ids(path: Path) -> set[str]:
    """Returns the ids of the trajectories in a file; none if there is no such file."""
    if not path.exists():
        return set()
    decoder = msgspec.json.Decoder(_Id)
    return {json_lines.decode(line.data, decoder).id for line in json_lines.lines(path)}


def _stamp(path: Path) -> str:
    found = NAME.fullmatch(path.name)
    assert found is not None, path
    return found[2]


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f"{kind}-{_stamp(path)}.jsonl")


def _unwritable(reason: str) -> ChatError:
    return ChatError(503, f"the gateway cannot record this call: {reason}", code="not_recorded", retry_after=RETRY_S)
