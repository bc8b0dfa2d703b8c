"""Verdicts already paid for, and what every call cost: one SQLite file that several processes may share.

A verdict's key is a digest of all that decides it (prompt, model, endpoint, parameters), so a changed rubric or a
changed attempt is another key. A row begins with a digest of its key and its content, since SQLite would hand out a
flipped bit. The file holds scores and explanations; it holds no prompts and no API keys. A commit survives the death of
the process at any instant (write-ahead log).
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from art_cli.errors import JudgeStopped, UsageError
from art_cli.judges.costs import Spent, Usage
from art_cli.judges.ruler.verdict import Entry
from art_cli.private import make_directory, owner_only

_SCHEMA = """
create table if not exists verdicts (key text primary key, value blob not null, at real not null);
create table if not exists calls (
    job text not null, model text not null, group_id text not null, outcome text not null,
    prompt_tokens integer not null, completion_tokens integer not null, cost_usd real, latency_s real not null,
    at real not null);
create index if not exists calls_by_job on calls (job);
"""
# Refuses a file whose tables are another program's. Sums leave out what no call takes: a damaged row is no money back.
_CHECK = (
    "select key, value, at from verdicts limit 0",
    "select job, model, group_id, outcome, prompt_tokens, completion_tokens, cost_usd, latency_s, at from calls "
    "limit 0",
)
_SPENT = """
select total(case when cost_usd between 0 and 1e9 then cost_usd else 0 end),
       total(case when prompt_tokens between 0 and 1e9 then prompt_tokens else 0 end)
     + total(case when completion_tokens between 0 and 1e9 then completion_tokens else 0 end)
from calls where job = ?
"""
DIGEST = 16  # bytes of a row's digest
MAX_ROW = 10_000_000  # bytes; 64 attempts with long explanations take 500 kB
MAX_COUNT = 1e12  # calls, tokens, dollars or seconds of one vote; a larger number is not one
BUSY_S = 10.0  # longest wait for another process's commit
HELD_MS = 20  # of it in one piece, which holds the event loop

T = TypeVar("T")


class StoredVote(msgspec.Struct, frozen=True):
    """One usable answer, G attempts in the order of their digests: scores, places in the prompt, and what it took."""

    entries: list[Entry]  # [G]
    positions: list[int]  # [G]
    usage: Usage  # of all calls behind it, refused answers included


class CacheBusy(JudgeStopped):
    """Another process holds the file."""


class VerdictCache:
    """Opens (and makes) the file. `path` None keeps everything in memory, for this process only.

    A row that cannot be read is one that is not there. What the file itself refuses raises UsageError when it is
    opened, JudgeStopped later: CacheBusy while another process holds it, which `patiently` waits out.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                make_directory(path.parent)
                with open(path, "ab", opener=owner_only):  # SQLite's own files beside it take its mode
                    pass
            self._db = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None)
            self._db.execute("pragma trusted_schema = off")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_SCHEMA)
            for query in _CHECK:
                self._db.execute(query)
            self._db.execute(f"pragma busy_timeout = {HELD_MS}")
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise UsageError(
                f"judge.cache: {path}: {_line(error)}; name another file, or turn it off with judge.cache=null"
            ) from error
        self._decoder = msgspec.msgpack.Decoder(StoredVote)

    def get(self, key: str, num_attempts: int) -> StoredVote | None:
        """The vote of that key on so many attempts; None also for a row that is none."""
        query = "select cast(value as blob) from verdicts where key = ? and length(value) between 1 and ?"
        with self._use() as db:
            row = db.execute(query, (key, MAX_ROW)).fetchone()
        value = row[0][DIGEST:] if row else b""
        if not row or row[0][:DIGEST] != _digest(key, value):
            return None
        try:
            vote = self._decoder.decode(value)
        except (ValueError, RecursionError):
            return None
        return vote if _is_usable(vote, num_attempts) else None

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """The database. Raises JudgeStopped for what it refuses."""
        try:
            yield self._db
        except (sqlite3.Error, UnicodeError) as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise (CacheBusy if is_busy else JudgeStopped)(
                f"judge.cache: {self.path}: {_line(error)}; move it away, name another file, or turn it off with "
                "judge.cache=null; what is scored is saved"
            ) from error

    def put(self, key: str, vote: StoredVote) -> None:
        """On disk when it returns."""
        value = msgspec.msgpack.encode(vote)
        with self._use() as db:
            row = key, _digest(key, value) + value, time.time()
            db.execute("insert or replace into verdicts values (?, ?, ?)", row)

    def record_call(self, *, job: str, model: str, group_id: str, outcome: str, usage: Usage) -> None:
        """Writes one billed call down; `outcome`: "verdict", or why its answer could not be used."""
        texts = (_storable(text) for text in (job, model, group_id, outcome))
        tokens = usage.prompt_tokens, usage.completion_tokens
        with self._use() as db:
            db.execute(
                "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*texts, *tokens, usage.cost_usd, usage.latency_s, time.time()),
            )

    def spent(self, job: str) -> Spent:
        """What all calls of a job took so far, those of killed processes and of refused answers included."""
        with self._use() as db:
            usd, tokens = db.execute(_SPENT, (_storable(job),)).fetchone()
        return Spent(usd, int(tokens))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


async def patiently(work: Callable[[], T]) -> T:
    """What `work` returns, done again while another process holds the file. Raises CacheBusy after BUSY_S."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return work()
        except CacheBusy:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(HELD_MS / 1000)


def _digest(key: str, value: bytes) -> bytes:
    return hashlib.sha256(key.encode() + value).digest()[:DIGEST]


def _is_usable(vote: StoredVote, num_attempts: int) -> bool:
    """Whether a stored vote says what a usable answer says; another program or a flipped bit may have written it."""
    places_are_whole = sorted(vote.positions) == list(range(num_attempts))
    scores_are_in_range = all(0 <= entry.score <= 1 for entry in vote.entries)  # NaN, too, is not
    usage = vote.usage
    counts = usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd or 0.0, usage.latency_s
    is_paid = all(0 <= count < MAX_COUNT for count in counts)
    return len(vote.entries) == num_attempts and places_are_whole and scores_are_in_range and is_paid


def _line(error: Exception) -> str:
    """SQLite repeats a damaged schema, newlines and all."""
    return " ".join(str(error).split())[:200]


def _storable(text: str) -> str:
    """The text as SQLite takes it, without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def user_cache_path() -> Path:
    """`art/verdicts.sqlite` in the user's cache directory (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art" / "verdicts.sqlite"
