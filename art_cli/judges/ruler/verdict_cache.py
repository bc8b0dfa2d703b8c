"""VerdictCache: paid verdicts and a ledger of calls, in a SQLite file shared between processes.

Keys are digests of all inputs that influence a verdict (prompt, model, endpoint, parameters). Each row starts with a
checksum of key and content, because SQLite does not detect flipped bits. The file contains scores and explanations but
no prompts or API keys. Commits survive a kill at any moment (write-ahead log).
"""

import asyncio
import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from art_cli.judges.costs import Spent, Usage
from art_cli.judges.ruler.verdict import Entry
from art_cli.runtime.errors import JudgeStopped, UsageError
from art_cli.runtime.scratch import make_directory, owner_only

_SCHEMA = """
create table if not exists verdicts (key text primary key, value blob not null, at real not null);
create table if not exists calls (
    job text not null, model text not null, group_id text not null, outcome text not null,
    prompt_tokens integer not null, completion_tokens integer not null, cost_usd real, latency_s real not null,
    at real not null);
create index if not exists calls_by_job on calls (job);
"""
# These queries fail on a SQLite file from another program.
_CHECK = (
    "select key, value, at from verdicts limit 0",
    "select job, model, group_id, outcome, prompt_tokens, completion_tokens, cost_usd, latency_s, at from calls "
    "limit 0",
)
# Implausible numbers are ignored, so a damaged row cannot refund money.
_SPENT = """
select total(case when cost_usd between 0 and 1e9 then cost_usd else 0 end),
       total(case when prompt_tokens between 0 and 1e9 then prompt_tokens else 0 end)
     + total(case when completion_tokens between 0 and 1e9 then completion_tokens else 0 end)
from calls where job = ?
"""
DIGEST = 16  # checksum bytes at the start of a row
MAX_ROW = 10_000_000  # bytes; 64 attempts with long explanations take 500 kB
MAX_COUNT = 1e12  # calls, tokens, dollars or seconds per vote; larger numbers are damage
BUSY_S = 10.0  # maximum wait for another process's commit
HELD_MS = 20  # maximum blocking wait inside SQLite, on the event loop

T = TypeVar("T")


class StoredVote(msgspec.Struct, frozen=True):
    """A usable answer on G attempts, ordered by attempt digest."""

    entries: list[Entry]  # [G]
    positions: list[int]  # [G] prompt positions, 0 first
    usage: Usage  # usage of all calls for this vote, including rejected answers
    model: str | None = None  # model named in the reply; missing in old rows


class CacheBusy(JudgeStopped):
    """Another process holds the lock."""


class VerdictCache:
    """Opens or creates the file. With `path` None everything stays in memory.

    Unreadable rows count as missing. SQLite errors raise UsageError on opening and JudgeStopped later. While another
    process holds the lock, methods raise CacheBusy; `patiently` retries.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                make_directory(path.parent)
                with open(path, "ab", opener=owner_only):  # SQLite's extra files inherit the mode
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
        """Returns the vote on `num_attempts` attempts stored under a key, if present, intact and in range."""
        query = "select cast(value as blob) from verdicts where key = ? and length(value) between 1 and ?"
        with self._use() as db:
            row = db.execute(query, (key, MAX_ROW)).fetchone()
        value = row[0][DIGEST:] if row else b""
        if not row or row[0][:DIGEST] != _digest(key, value):
            return None
        try:
            vote: StoredVote = self._decoder.decode(value)
        except (ValueError, RecursionError):  # written by an older version
            return None
        return vote if _is_usable(vote, num_attempts) else None

    @contextlib.contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """Yields the database; converts SQLite errors to JudgeStopped."""
        try:
            yield self._db
        except (sqlite3.Error, UnicodeError) as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise (CacheBusy if is_busy else JudgeStopped)(
                f"judge.cache: {self.path}: {_line(error)}; move it away, name another file, or turn it off with "
                "judge.cache=null; what is scored is saved"
            ) from error

    def put(self, key: str, vote: StoredVote) -> None:
        """Stores a vote durably."""
        value = msgspec.msgpack.encode(vote)
        with self._use() as db:
            row = key, _digest(key, value) + value, time.time()
            db.execute("insert or replace into verdicts values (?, ?, ?)", row)

    def record_call(self, *, job: str, model: str, group_id: str, outcome: str, usage: Usage) -> None:
        """Adds one billed call to the ledger. `outcome` is "verdict", or the reason for rejecting the answer."""
        texts = (_storable(text) for text in (job, model, group_id, outcome))
        tokens = usage.prompt_tokens, usage.completion_tokens
        with self._use() as db:
            db.execute(
                "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*texts, *tokens, usage.cost_usd, usage.latency_s, time.time()),
            )

    def spent(self, job: str) -> Spent:
        """Returns the job's total usage so far, including killed processes and rejected answers."""
        with self._use() as db:
            usd, tokens = db.execute(_SPENT, (_storable(job),)).fetchone()
        return Spent(usd, int(tokens))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


async def patiently(work: Callable[[], T]) -> T:
    """Runs `work`, retrying while another process holds the lock. Raises CacheBusy after BUSY_S."""
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
    """Returns True if a stored vote is complete and in range; another program may have written it."""
    is_complete = sorted(vote.positions) == list(range(num_attempts))
    is_in_range = all(0 <= entry.score <= 1 for entry in vote.entries)  # NaN fails, too
    usage = vote.usage
    counts = usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd or 0.0, usage.latency_s
    is_paid = all(0 <= count < MAX_COUNT for count in counts)
    return len(vote.entries) == num_attempts and is_complete and is_in_range and is_paid


def _line(error: Exception) -> str:
    """Returns the error as one line; SQLite errors can contain newlines."""
    return " ".join(str(error).split())[:200]


def _storable(text: str) -> str:
    """Replaces lone surrogates, which SQLite rejects."""
    return text.encode("utf-8", "replace").decode()
