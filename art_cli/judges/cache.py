"""Verdicts already paid for, and what every call cost: one SQLite file that several processes may share.

A verdict's key is a digest of all that decides it (prompt, model, endpoint, parameters), so a changed rubric or a
changed attempt is another key. The file holds scores and explanations; it holds no prompts and no API keys. A commit
survives the death of the process at any instant (write-ahead log).
"""

import contextlib
import hashlib
import os
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.errors import UsageError
from art_cli.judges.verdict import Entry
from art_cli.private import make_directory, owner_only

_SCHEMA = """
create table if not exists verdicts (key text primary key, value blob not null, at real not null);
create table if not exists calls (
    job text not null, model text not null, group_id text not null, outcome text not null,
    prompt_tokens integer not null, completion_tokens integer not null, cost_usd real, latency_s real not null,
    at real not null);
create index if not exists calls_by_job on calls (job);
"""
BUSY_S = 30.0  # how long to wait for another process's commit


class Usage(msgspec.Struct, frozen=True):
    """What calls took. `cost_usd` None: at least one call's price is unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0
    latency_s: float = 0.0  # of all calls, one after the other

    def __add__(self, other: "Usage") -> "Usage":
        costs = (self.cost_usd, other.cost_usd)
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if costs[0] is None or costs[1] is None else costs[0] + costs[1],
            self.latency_s + other.latency_s,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class StoredVote(msgspec.Struct, frozen=True):
    """One usable answer, G attempts in the order of their digests: scores, places in the prompt, and what it took."""

    entries: list[Entry]  # [G]
    positions: list[int]  # [G]
    usage: Usage  # of all calls behind it, refused answers included


class Spent(NamedTuple):
    usd: float
    tokens: int


class VerdictCache:
    """Opens (and makes) the file. `path` None keeps everything in memory, for this process only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                make_directory(path.parent)
                with open(path, "ab", opener=owner_only):  # SQLite's own files beside it take its mode
                    pass
            self._db = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"judge.cache: {path}: {error}; name another file, or turn it off with judge.cache=null"
            ) from error
        self._decoder = msgspec.msgpack.Decoder(StoredVote)

    def get(self, key: str) -> StoredVote | None:
        row = self._db.execute("select value from verdicts where key = ?", (key,)).fetchone()
        return self._decoder.decode(row[0]) if row else None

    def put(self, key: str, vote: StoredVote) -> None:
        """On disk when it returns."""
        self._db.execute(
            "insert or replace into verdicts values (?, ?, ?)", (key, msgspec.msgpack.encode(vote), time.time())
        )

    def record_call(self, *, job: str, model: str, group_id: str, outcome: str, usage: Usage) -> None:
        """Writes one billed call down; `outcome`: "verdict", or why its answer could not be used."""
        self._db.execute(
            "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                job,
                model,
                group_id,
                outcome,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cost_usd,
                usage.latency_s,
                time.time(),
            ),
        )

    def spent(self, job: str) -> Spent:
        """What all calls of a job took so far, those of killed processes and of refused answers included."""
        usd, tokens = self._db.execute(
            "select total(cost_usd), total(prompt_tokens + completion_tokens) from calls where job = ?", (job,)
        ).fetchone()
        return Spent(usd, int(tokens))

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


def user_cache_path() -> Path:
    """`art/verdicts.sqlite` in the user's cache directory (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art" / "verdicts.sqlite"


def make_key(**parts: object) -> str:
    """A digest of everything that decides a verdict; the same in every process."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
