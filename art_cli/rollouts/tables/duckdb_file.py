"""One SELECT on a DuckDB file, which is opened for reading only, without any other file, within a time."""

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

from art_cli.rollouts.tables.columns import Columns, TableRow
from art_cli.rollouts.tables.parquet import BATCH_ROWS, needs
from art_cli.runtime.errors import DataError, describe, printable

SETTINGS = {
    "enable_external_access": False,  # no other file, no extension, no address
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "temp_directory": "",  # nothing is written beside the file
    "lock_configuration": True,
    "memory_limit": "4GB",
    "threads": 2,
}


def rows(path: Path, query: str, columns: Columns, timeout_s: float) -> Generator[TableRow]:
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


def _fetch(cursor: Any, path: Path, columns: Columns) -> Generator[TableRow]:
    names = [column[0] for column in cursor.description]
    wanted = [(name, names.index(name)) for name in columns.wanted(names, path)]
    number = 0
    while values := cursor.fetchmany(BATCH_ROWS):
        for row in values:
            number += 1
            yield TableRow(f"{path}, row {number}", {name: row[place] for name, place in wanted})
