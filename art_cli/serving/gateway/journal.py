"""Journal: the files of a gateway's directory, written and read.

    lock                                   held by the writing process
    calls-20261122-195028.jsonl            the journal: a line per answered call, appended before its answer ends
    trajectories-20261122-195028.jsonl     the trajectories from that journal: one per line, ordered by group
    replies.sqlite                         the conversation of each reply in these files (reply_index.py)

The journal is the only record of answered calls. Rotation starts a new journal, writes the old journal's ended
conversations as a trajectory file, copies the calls of open conversations to the new journal, and removes the old
journal:

    start the new journal  ->  index its replies  ->  write a temporary trajectory file and rename it
                           ->  copy  ->  remove

Each conversation becomes a trajectory exactly once, even if the process is killed at any point. A journal that already
has a trajectory file still needs copying; an older journal without a trajectory file is copied whole. A call copied
twice counts once, because both copies have the same number in the conversation.
"""

import asyncio
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import hex_id
from art_cli.runs import json_lines
from art_cli.runs.durable import LineWriter, SharedSync, lock_directory, newer_schema, sync_directory, write_lines
from art_cli.runs.trajectory import SCHEMA_VERSION, Trajectory
from art_cli.runtime.errors import DataError
from art_cli.runtime.scratch import make_directory
from art_cli.serving.gateway.entries import Head, JournalEntry
from art_cli.serving.gateway.journaled_recorder import places, trajectory_of
from art_cli.serving.gateway.reply_index import Answered, Names, ReplyIndex, episode_keys, reply_key

log = logging.getLogger(__name__)

CALLS, TRAJECTORIES = "calls", "trajectories"
INDEX = "replies.sqlite"
NAME = re.compile(r"(calls|trajectories)-(\d{8}-\d{6})\.jsonl")
STAMP = "%Y%m%d-%H%M%S"
MIN_FREE = 64 * 2**20  # with less free disk space, calls are refused, because recording their answers might fail
RETRY_S = "30"

_HEAD = msgspec.json.Decoder(Head)
_ENTRY = msgspec.json.Decoder(JournalEntry)


class WrittenFile(NamedTuple):
    """A trajectory file. Example: WrittenFile(Path("trajectories-20261122-195028.jsonl"), 120, num_exact=118)"""

    path: Path
    num: int
    num_exact: int  # trajectories with token ids and logprobs for every call


class _Line(NamedTuple):
    offset: int
    length: int
    at: float


class Outline(NamedTuple):
    """A journal's conversations. `lines`: conversation -> number -> entry position."""

    path: Path
    lines: dict[str, dict[int, _Line]]
    scenarios: dict[str, str]
    names: Names

    def last_at(self, conversation: str) -> float:
        return max(line.at for line in self.lines[conversation].values())

    def read(self, conversation: str) -> list[JournalEntry]:
        """Returns a conversation's entries up to the first gap. An invalid line is logged, and its entry is empty."""
        entries = []
        with self.path.open("rb") as file:
            for expected, (number, line) in enumerate(sorted(self.lines[conversation].items())):
                if number != expected:
                    log.warning("%s: entry %d of %s is missing", self.path, expected, conversation)
                    break
                file.seek(line.offset)
                data = file.read(line.length)
                try:
                    entries.append(json_lines.decode(data, _ENTRY))
                except ValueError as error:
                    log.warning("%s: entry %d of %s is left out: %s", self.path, number, conversation, error)
                    head = json_lines.decode(data, _HEAD)
                    empty = JournalEntry(conversation=conversation, number=number, at=line.at, scenario=head.scenario)
                    empty.client, empty.name = head.client, head.name
                    entries.append(empty)
        return entries

    def copy(self, conversations: Iterable[str]) -> Iterator[tuple[str, list[msgspec.Raw]]]:
        """Yields each conversation's raw lines."""
        with self.path.open("rb") as file:
            for conversation in conversations:
                lines = []
                for line in self.lines[conversation].values():
                    file.seek(line.offset)
                    lines.append(msgspec.Raw(file.read(line.length).rstrip(b"\n")))
                yield conversation, lines


class _Retired(NamedTuple):
    path: Path
    open: frozenset[str]  # conversations that continue in the new journal
    copied: set[str]  # open conversations already copied
    names: Names  # ids in it


class Journal:
    """Trajectory files are due after `rotate_bytes` of calls, or `rotate_s` after the oldest call."""

    def __init__(self, directory: Path, *, group_size: int, rotate_bytes: float, rotate_s: float) -> None:
        self.directory, self._group_size = directory, group_size
        self._rotate_bytes, self._rotate_s = rotate_bytes, rotate_s
        self._writer: LineWriter
        self._shared: SharedSync  # of the writer
        self._names: Names = {}  # ids in the current journal
        self._retired: _Retired | None = None
        self._conversations: set[str] = set()  # conversations in the current journal
        self._num_bytes = 0  # size of new calls in the current journal
        self._first_at: float | None = None  # time of the oldest new call
        self._folding = threading.Lock()  # a rotation thread may still be running when the gateway stops
        self._stack = ExitStack()
        self.written: list[WrittenFile] = []  # trajectory files written since opening

    def __enter__(self) -> Self:
        """Raises RunError if another process writes here, and DataError for unreadable files."""
        make_directory(self.directory)
        with ExitStack() as stack:
            stack.enter_context(lock_directory(self.directory, self.directory / "lock"))
            for path in self.directory.glob(f".{TRAJECTORIES}-*.tmp"):  # left by a killed writer
                path.unlink(missing_ok=True)
            self._index = ReplyIndex(self.directory / INDEX)
            stack.callback(self._index.close)
            self._recover()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()
        self._stack.close()

    # --- appending ----------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises ChatError 503 if the disk is almost full, because recording an answer might fail."""
        free = shutil.disk_usage(self.directory).free
        if free < MIN_FREE:
            raise _unwritable(f"only {free >> 20} MB are free on its disk")

    def append(self, entry: JournalEntry) -> int:
        """Passes the line to the system and returns its length. Raises ChatError 503 on failure."""
        line = msgspec.json.encode(entry)
        try:
            self._shared.append(msgspec.Raw(line))
        except (OSError, ValueError) as error:  # ValueError: closed, because the gateway has stopped
            reason = getattr(error, "strerror", None) or str(error)
            log.error("%s: a call is not recorded: %s", self._writer.path, reason)
            raise _unwritable(reason) from error
        self._num_bytes += len(line)
        self._first_at = entry.at if self._first_at is None else self._first_at
        self._conversations.add(entry.conversation)
        self._names |= names_of(entry)
        return len(line)

    async def sync(self) -> None:
        """Waits until earlier appends are on disk; calls share a write. Raises ChatError 503 if the disk fails."""
        try:
            await self._shared.sync()
        except OSError as error:
            log.error("%s: %s", self._writer.path, error.strerror or error)
            raise _unwritable(error.strerror or str(error)) from error

    async def find(self, client: str, keys: Sequence[str]) -> Answered | None:
        """Returns what the first known key of a client belongs to (reply_index.py). Raises OSError."""
        for key in keys:
            for names in (self._names, self._retired.names if self._retired else {}):
                if (client, key) in names:
                    return names[client, key]
            if found := await asyncio.to_thread(self._index.find, client, key):
                return found
        return None

    # --- rotation -----------------------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Returns True if a trajectory file is due by size or age, or because an earlier attempt failed."""
        if self._retired is not None:
            return True
        is_old = self._first_at is not None and abs(now - self._first_at) >= self._rotate_s  # also if set back
        return self._num_bytes >= self._rotate_bytes or is_old

    async def rotate(self, open_conversations: AbstractSet[str]) -> None:
        """Turns all but the open conversations into trajectories. After an OSError the next call completes it."""
        if self._retired is None:
            if self._conversations <= open_conversations:
                return
            await self._shared.settle()
            retired = _Retired(self._writer.path, frozenset(open_conversations), set(), self._names)
            old = self._writer
            self._begin()
            old.close()
            self._retired = retired
        await asyncio.to_thread(self._end_retired)

    def finish(self) -> None:
        """Turns everything into trajectories. After an OSError the next start completes it."""
        self._end_retired()
        self._writer.close()
        with self._folding:
            self._fold(_Retired(self._writer.path, frozenset(), set(), {}), None)

    def _end_retired(self) -> None:
        with self._folding:
            if self._retired is not None:
                self._fold(self._retired, self._writer)
                self._retired = None

    def _fold(self, retired: _Retired, new: LineWriter | None) -> None:
        outline = _outline(retired.path)
        self._index.add(outline.names)
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
        """Starts a journal with a newer timestamp than all existing files."""
        latest = max((_stamp(path) for path in self._files(CALLS, TRAJECTORIES)), default="")
        now = datetime.now(UTC)
        if latest and now.strftime(STAMP) <= latest:  # rotated twice within a second, or the clock was set back
            now = datetime.strptime(latest, STAMP).replace(tzinfo=UTC) + timedelta(seconds=1)
        self._open(self.directory / f"{CALLS}-{now.strftime(STAMP)}.jsonl")

    def _open(self, path: Path) -> None:
        self._writer = LineWriter(path)
        self._shared = SharedSync(self._writer)
        sync_directory(path.parent)
        self._conversations, self._num_bytes, self._first_at, self._names = set(), 0, None, {}

    # --- after a kill -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Completes a killed process's work and opens its latest journal."""
        older = sorted(self._files(CALLS))
        if older and not _beside(older[-1], TRAJECTORIES).exists():
            self._open(older.pop())
        else:
            self._begin()
        for path in older:
            self._take_over(path)
        outline = self.outline()
        lines = [line for each in outline.lines.values() for line in each.values()]
        self._conversations, self._names = set(outline.lines), outline.names
        self._first_at = min((line.at for line in lines), default=None)
        self._num_bytes = sum(line.length for line in lines)

    def _take_over(self, path: Path) -> None:
        """Copies an older journal's remaining calls to the current journal, then removes the older journal."""
        done = _ids(_beside(path, TRAJECTORIES))
        outline = _outline(path)
        self._index.add(outline.names)
        here = self.outline().lines
        owed = [name for name in outline.lines if name not in done]
        for name, lines in outline.copy(owed):
            if not outline.lines[name].keys() <= here.get(name, {}).keys():
                self._writer.append_all(lines)
        self._writer.sync()
        path.unlink()

    def outline(self) -> Outline:
        return _outline(self._writer.path)

    def _files(self, *kinds: str) -> Iterator[Path]:
        for path in self.directory.iterdir():
            if (found := NAME.fullmatch(path.name)) and found[1] in kinds:
                yield path


def _outline(path: Path) -> Outline:
    """Raises DataError for invalid lines, except a torn last line."""
    lines: dict[str, dict[int, _Line]] = {}
    scenarios: dict[str, str] = {}
    names: Names = {}
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
        for key, answered in names_of(head).items():  # copied calls are older than lines before them
            names[key] = max(names.get(key, answered), answered, key=lambda each: each.at)
    return Outline(path, lines, scenarios, names)


def names_of(entry: Head | JournalEntry) -> Names:
    """Returns the ids by which the entry's client may later name its conversation or reply."""
    if entry.call is None:  # the call that it gives up has named them
        return {}
    keys = [*episode_keys(entry.conversation)[:1], reply_key(hex_id(entry.call.reply.id))]
    keys += [] if entry.name is None else episode_keys(entry.name)[-1:]
    answered = Answered(entry.conversation, entry.call.reply.policy, entry.at)
    return {(entry.client, key): answered for key in keys}


class _Id(msgspec.Struct):
    id: str


def _ids(path: Path) -> set[str]:
    """Returns the trajectory ids in a file; empty if the file is missing."""
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
