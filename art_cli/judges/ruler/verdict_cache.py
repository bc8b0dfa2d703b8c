"""Verdicts already paid for, and what every call cost: one SQLite file that several processes may share.

A verdict's key is a digest of everything that decides it (prompt, model, endpoint, parameters), so that a changed
rubric or a changed attempt has another key. A row begins with a digest of its key and its content, because SQLite does
not notice a flipped bit. The file holds scores and explanations, but no prompts and no API keys. A commit survives the
death of the process at any instant (write-ahead log).
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
from art_cli.runtime.scratch import make_directory, owner_only, user_cache

_SCHEMA = """
create table if not exists verdicts (key text primary key, value blob not null, at real not null);
create table if not exists calls (
    job text not null, model text not null, group_id text not null, outcome text not null,
    prompt_tokens integer not null, completion_tokens integer not null, cost_usd real, latency_s real not null,
    at real not null);
create index if not exists calls_by_job on calls (job);
"""
# These queries fail on a file whose tables are another program's.
_CHECK = (
    "select key, value, at from verdicts limit 0",
    "select job, model, group_id, outcome, prompt_tokens, completion_tokens, cost_usd, latency_s, at from calls "
    "limit 0",
)
# Numbers that no call takes are left out of the sums, so that a damaged row gives no money back.
_SPENT = """
select total(case when cost_usd between 0 and 1e9 then cost_usd else 0 end),
       total(case when prompt_tokens between 0 and 1e9 then prompt_tokens else 0 end)
     + total(case when completion_tokens between 0 and 1e9 then completion_tokens else 0 end)
from calls where job = ?
"""
DIGEST = 16  # bytes of the digest that a row begins with
MAX_ROW = 10_000_000  # bytes; 64 attempts with long explanations take 500 kB
MAX_COUNT = 1e12  # calls, tokens, dollars or seconds of one vote; a larger number cannot be true
BUSY_S = 10.0  # longest wait for another process's commit
HELD_MS = 20  # longest single wait inside SQLite, which holds the event loop

T = TypeVar("T")


class StoredVote(msgspec.Struct, frozen=True):
    """One usable answer on G attempts, in the order of their digests."""

    entries: list[Entry]  # [G]
    positions: list[int]  # [G] position of each attempt in the prompt, 0 first
    usage: Usage  # usage of all calls that led to it, including those whose answer was refused
    model: str | None = None  # the model that the reply named, or None if it named none, or an older art wrote the row


class CacheBusy(JudgeStopped):
    """Another process holds the file's lock."""


class VerdictCache:
    """Opens the file, or makes it. `path` None keeps everything in memory, for this process only.

    A row that cannot be read counts as missing. An error of SQLite raises UsageError when the file is opened, and
    JudgeStopped later; while another process holds the file it raises CacheBusy, which `patiently` waits out.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                make_directory(path.parent)
                with open(path, "ab", opener=owner_only):  # the files that SQLite makes beside it get the same mode
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
        """Returns the vote with that key on `num_attempts` attempts, or None if there is no such row, or it is
        damaged."""
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
        """The database. Turns errors of SQLite into JudgeStopped."""
        try:
            yield self._db
        except (sqlite3.Error, UnicodeError) as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise (CacheBusy if is_busy else JudgeStopped)(
                f"judge.cache: {self.path}: {_line(error)}; move it away, name another file, or turn it off with "
                "judge.cache=null; what is scored is saved"
            ) from error

    def put(self, key: str, vote: StoredVote) -> None:
        """Writes the vote; it is on disk when this returns."""
        value = msgspec.msgpack.encode(vote)
        with self._use() as db:
            row = key, _digest(key, value) + value, time.time()
            db.execute("insert or replace into verdicts values (?, ?, ?)", row)

    def record_call(self, *, job: str, model: str, group_id: str, outcome: str, usage: Usage) -> None:
        """Writes one billed call into the ledger; `outcome` is "verdict", or why its answer could not be used."""
        texts = (_storable(text) for text in (job, model, group_id, outcome))
        tokens = usage.prompt_tokens, usage.completion_tokens
        with self._use() as db:
            db.execute(
                "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*texts, *tokens, usage.cost_usd, usage.latency_s, time.time()),
            )

    def spent(self, job: str) -> Spent:
        """Returns the usage of a job's calls so far, with those of killed processes and of refused answers."""
        with self._use() as db:
            usd, tokens = db.execute(_SPENT, (_storable(job),)).fetchone()
        return Spent(usd, int(tokens))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


async def patiently(work: Callable[[], T]) -> T:
    """Returns the result of `work`, repeated while another process holds the file. Raises CacheBusy after BUSY_S."""
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
    """Returns whether a stored vote is complete and in range; another program may have written it."""
    is_complete = sorted(vote.positions) == list(range(num_attempts))
    is_in_range = all(0 <= entry.score <= 1 for entry in vote.entries)  # NaN fails this, too
    usage = vote.usage
    counts = usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd or 0.0, usage.latency_s
    is_paid = all(0 <= count < MAX_COUNT for count in counts)
    return len(vote.entries) == num_attempts and is_complete and is_in_range and is_paid


def _line(error: Exception) -> str:
    """Returns the error on one line; SQLite quotes a damaged schema with its newlines."""
    return " ".join(str(error).split())[:200]


def _storable(text: str) -> str:
    """Returns the text without lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "replace").decode()


def user_cache_path() -> Path:
    """`art/verdicts.sqlite` in the user's cache directory (XDG)."""
    return user_cache() / "verdicts.sqlite"
