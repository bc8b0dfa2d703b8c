"""Scenarios from tables: CSV, Parquet, Hugging Face datasets, and SQL on SQLite or DuckDB files.

A reader yields a source's rows in order. `Columns` turns rows into scenarios: it maps columns to keys, chooses the id,
and checks for JSON. File contents are data: no reader runs code from a dataset, and a query can only read its own file.
"""

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from art_cli.config.sections.rollout_config import ScenariosConfig, is_dataset
from art_cli.rollouts.tables.columns import Columns, Json, TableRow
from art_cli.runtime.errors import DataError

DATABASES = {"sqlite": b"SQLite format 3\0", "duckdb": b"DUCK"}
PARQUET = b"PAR1"


def is_table(source: ScenariosConfig, directory: Path) -> bool:
    """Returns whether the source is a table. False: JSON lines, or a Python function."""
    return source.query is not None or source.split is not None or _kind(directory / source.source) is not None


def table_scenarios(source: ScenariosConfig, directory: Path) -> list[Json]:
    """Returns a table's scenarios in order. Raises DataError for an invalid table."""
    columns = Columns(source.columns)
    with closing(_rows(source, directory / source.source, columns)) as rows:
        return columns.scenarios(rows, source.source)


def _rows(source: ScenariosConfig, path: Path, columns: Columns) -> Generator[TableRow]:
    kind = _kind(path)
    if source.query is not None and kind in DATABASES:
        from art_cli.rollouts.tables import databases

        query = databases.sqlite_rows if kind == "sqlite" else databases.duckdb_rows
        return query(path, source.query, columns, source.timeout_s)
    if source.query is not None:
        what = "no SQLite or DuckDB file" if path.exists() else "no such file"
        raise DataError(f"{what}, which a query is asked of", path)
    if kind in DATABASES:
        raise DataError(f"a {kind} file; add what to read from it, {{query: SELECT ... FROM ...}}", path)
    if kind == "dataset" or (source.split is not None and kind is None):
        if kind and not is_dataset(path):
            raise DataError("not a saved dataset; write one with `save_to_disk` of the library datasets", path)
        from art_cli.rollouts.tables import arrow

        return arrow.dataset_rows(source, path, columns)
    if source.split is not None:
        raise DataError("one file has no splits; leave `split` out, or name a dataset", path)
    if kind == "parquet":
        from art_cli.rollouts.tables import arrow

        return arrow.parquet_rows(path, columns)
    from art_cli.rollouts.tables import csv_file

    return csv_file.rows(path, columns)


def _kind(path: Path) -> str | None:
    """Returns sqlite, duckdb, parquet, csv, or dataset (a directory); None if the source is not a table."""
    if path.is_dir():
        return "dataset"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(16)
    if start == DATABASES["sqlite"]:
        return "sqlite"
    if start[8:12] == DATABASES["duckdb"]:
        return "duckdb"
    suffix = path.suffix.lower()
    if start.startswith(PARQUET) or suffix == ".parquet":
        return "parquet"
    return "csv" if suffix in (".csv", ".tsv") else None


__all__ = ["Columns", "TableRow", "is_table", "table_scenarios"]
