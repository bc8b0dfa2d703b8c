"""ReplyIndex: finds the conversation of a client's reply, days later. A SQLite file next to the trajectories.

The journal adds its ids before it is removed. Until then it finds them in memory.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from art_cli.chat.replies import hex_id


class Answered(NamedTuple):
    """The conversation that an id belongs to. Example: Answered("4f0c...", "9f3c...", 1764.2)"""

    conversation: str
    policy: str = ""  # digest of the policy that answered last; "" if unproven
    at: float = 0.0  # time of this answer, in seconds since the epoch; 0: unknown


Names = dict[tuple[str, str], Answered]  # by (client, id with its kind)

BUSY_S = 60.0
_SCHEMA = """CREATE TABLE IF NOT EXISTS names
    (client TEXT, id TEXT, conversation TEXT, policy TEXT DEFAULT '', at REAL DEFAULT 0,
    PRIMARY KEY (client, id)) WITHOUT ROWID"""
_NEWER = {"policy": "TEXT DEFAULT ''", "at": "REAL DEFAULT 0"}  # columns that files from before `art improve` lack


def reply_key(reply: str) -> str:
    return f"reply {reply}"


def episode_keys(episode: str) -> list[str]:
    """Returns the keys of a conversation's id or name, in the order of preference."""
    id = hex_id(episode)
    return [*([f"conversation {id}"] if id else []), f"name {episode}"]


class ReplyIndex:
    """Example: `index.find("key 2", "reply 77ab...")`. Methods may run in any thread."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file is not such an index."""
        self._path, self._lock = path, threading.Lock()
        path.touch(mode=0o600)
        with self._failures():
            self._reader = self._connect()
            self._reader.execute(_SCHEMA)
            there = [column[1] for column in self._reader.execute("PRAGMA table_info(names)")]
            for name, kind in _NEWER.items():  # a kill may have come between two
                if name not in there:
                    self._reader.execute(f"ALTER TABLE names ADD COLUMN {name} {kind}")

    def add(self, names: Names) -> None:
        """Returns when the names are on disk. Raises OSError on failure."""
        with self._failures(), contextlib.closing(self._connect()) as writer:
            rows = [(client, id, *answered) for (client, id), answered in names.items()]
            writer.execute("BEGIN IMMEDIATE")
            writer.executemany("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?)", rows)
            writer.execute("COMMIT")

    def find(self, client: str, key: str) -> Answered | None:
        """Raises OSError on failure."""
        query = "SELECT conversation, policy, at FROM names WHERE client = ? AND id = ?"
        with self._failures(), self._lock:
            row = self._reader.execute(query, (client, key)).fetchone()
        return None if row is None else Answered(*row)

    def close(self) -> None:
        self._reader.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")  # so that `find` never waits for `add`
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise OSError(f"{self._path}: {error}") from error
