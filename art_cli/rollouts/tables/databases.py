"""One SELECT on a SQLite or DuckDB file, which is opened for reading only, without any other file, within a time."""

import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_cli.rollouts.tables.arrow import BATCH_ROWS, needs
from art_cli.rollouts.tables.columns import MAX_CELL, Columns, TableRow
from art_cli.runtime.errors import DataError, describe, printable

ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
READ_BY_INDEXES = ("data_version", "page_size")  # pragmas that a full-text index reads on opening
REFUSALS = ("not authorized", "authorization denied", "prohibited", "one statement", "may not be modified", "readonly")
INSTRUCTIONS = 10_000  # SQLite VM instructions between two checks of the clock, well below a millisecond
SETTINGS = {
    "enable_external_access": False,  # prevents access to other files, extensions, and URLs
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "temp_directory": "",  # no temporary files in the database's directory
    "lock_configuration": True,
    "memory_limit": "4GB",
    "threads": 2,
}


def sqlite_rows(path: Path, query: str, columns: Columns, timeout_s: float) -> Generator[TableRow]:
    """Yields the rows of the query. Raises DataError: anything but one SELECT, an error of SQLite, a longer time."""
    deadline = time.monotonic() + timeout_s
    try:
        with closing(_open(path, deadline)) as database:
            cursor = database.execute(query)
            if cursor.description is None:
                raise DataError("the query is empty; it is one SELECT", path)
            yield from _fetch(cursor, path, columns, batch=1)  # a cell may be large, so each row is checked first
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if any(words in str(error) for words in REFUSALS):
            raise DataError(f"the query is not one SELECT, and nothing else is run: {printable(error)}", path) from None
        if "interrupted" in str(error):
            raise DataError(f"the query took longer than {timeout_s:g} s (timeout_s)", path) from None
        raise DataError(f"SQLite: {printable(error, limit=200)}", path) from None


def _open(path: Path, deadline: float) -> sqlite3.Connection:
    wait_s = max(0.0, deadline - time.monotonic())
    address = f"file:{quote(str(path.resolve()))}?{_options(path)}"
    database = sqlite3.connect(address, uri=True, timeout=wait_s)
    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * MAX_CELL)  # bytes; a character has up to four
        database.execute("PRAGMA trusted_schema = OFF")  # functions with effects are not run by views of the file
        database.set_progress_handler(lambda: time.monotonic() > deadline, INSTRUCTIONS)
        database.set_authorizer(_authorize)
    except BaseException:
        database.close()
        raise
    return database


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allows what a SELECT needs, and the declarations from opening a full-text index."""
    is_loading = action == sqlite3.SQLITE_FUNCTION and second in ("load_extension", "fts3_tokenizer")
    is_declaring = action == sqlite3.SQLITE_UPDATE and first == "sqlite_master"
    is_asking = action == sqlite3.SQLITE_PRAGMA and first in READ_BY_INDEXES and second is None
    is_allowed = action in ALLOWED and not is_loading
    return sqlite3.SQLITE_OK if is_allowed or is_declaring or is_asking else sqlite3.SQLITE_DENY


def _options(path: Path) -> str:
    """Opens a file read-only. A WAL file without a log is opened as immutable, so SQLite creates no files."""
    with path.open("rb") as file:
        is_wal = file.read(20)[18:] == b"\x02\x02"
    has_log = path.with_name(f"{path.name}-wal").exists()
    return "mode=ro&immutable=1" if is_wal and not has_log else "mode=ro"


def duckdb_rows(path: Path, query: str, columns: Columns, timeout_s: float) -> Generator[TableRow]:
    """Yields the rows of the query. Raises DataError: anything but one SELECT, an error of DuckDB, a longer time."""
    duckdb = needs("duckdb", path)
    late = threading.Event()
    try:
        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise DataError("the query is not one SELECT, and nothing else is run", path)
        database = duckdb.connect(str(path), read_only=True, config=SETTINGS)
    except duckdb.Error as error:
        raise DataError(f"DuckDB: {printable(describe(error), limit=300)}", path) from None
    timer = threading.Timer(timeout_s, _interrupt, (database, late))
    timer.daemon = True
    timer.start()
    try:
        yield from _fetch(database.execute(query), path, columns)
    except duckdb.Error as error:
        if late.is_set():
            raise DataError(f"the query took longer than {timeout_s:g} s (timeout_s)", path) from None
        raise DataError(f"DuckDB: {printable(describe(error), limit=300)}", path) from None
    finally:
        timer.cancel()
        database.close()


def _interrupt(database: Any, late: threading.Event) -> None:
    late.set()
    database.interrupt()


def _fetch(cursor: Any, path: Path, columns: Columns, *, batch: int = BATCH_ROWS) -> Generator[TableRow]:
    names = [column[0] for column in cursor.description]
    wanted = [(name, names.index(name)) for name in columns.wanted(names, path)]
    number = 0
    while values := cursor.fetchmany(batch):
        for row in values:
            number += 1
            yield TableRow(f"{path}, row {number}", {name: row[place] for name, place in wanted})
