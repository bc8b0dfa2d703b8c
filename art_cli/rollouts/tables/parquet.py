"""Parquet files, and rows of Arrow tables as plain values."""

import importlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from art_cli.rollouts.tables.columns import MAX_BYTES, MAX_ROWS, Columns, Json, TableRow
from art_cli.runtime.errors import DataError, describe, printable

BATCH_ROWS = 64  # rows that are unpacked at once
LARGE_BATCH = 64 * 2**20  # bytes of a batch whose rows are made one by one


def rows(path: Path, columns: Columns) -> Generator[TableRow]:
    """Yields the rows of a Parquet file. Raises DataError: another format, a type that JSON lacks, size, damage."""
    pyarrow = needs("pyarrow", path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        schema, metadata = file.schema_arrow, file.metadata
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"no Parquet file: {describe(error)}", path) from None
    with file:
        wanted = columns.wanted(schema.names, path)
        check_types(schema, wanted, path)
        if metadata.num_rows > MAX_ROWS:
            raise DataError(f"{metadata.num_rows} rows; at most {MAX_ROWS} are read", path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > MAX_BYTES:
            raise DataError(f"more than {MAX_BYTES >> 30} GiB when it is unpacked", path)
        yield from plain_rows(file.iter_batches(BATCH_ROWS, columns=wanted), path)


def plain_rows(batches: Iterator[Any], source: object) -> Generator[TableRow]:
    """Yields the rows of Arrow's record batches. Raises DataError: a batch cannot be read."""
    number = 0
    while True:
        try:
            batch = next(batches, None)
            values = [] if batch is None else _values(batch)
        except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors, or OSErrors for damaged pages
            raise DataError(f"damaged after row {number}: {describe(error)}", source) from None
        if batch is None:
            return
        for row in values:
            number += 1
            yield TableRow(f"{source}, row {number}", row)


def _values(batch: Any) -> Iterable[Json]:
    """Returns the rows of a batch; of one with large cells each as it is needed, because plain values are copies."""
    if batch.nbytes < LARGE_BATCH:
        rows: list[Json] = batch.to_pylist()
        return rows
    return (batch.slice(index, 1).to_pylist()[0] for index in range(batch.num_rows))


def check_types(schema: Any, wanted: Sequence[str], source: object) -> None:
    """Raises DataError: one of the columns has a type that JSON cannot hold."""
    for name in wanted:
        kind = schema.field(name).type
        if not _is_json(kind):
            cure = "cast it to text, or leave the column out with `columns`"
            raise DataError(
                f"column {name!r} is of type {printable(kind, limit=80)}, which JSON has not; {cure}", source
            )


def _is_json(kind: Any) -> bool:
    types = importlib.import_module("pyarrow.types")
    if types.is_struct(kind):
        return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json(kind.value_type)
    plain = ("boolean", "integer", "floating", "string", "large_string", "string_view", "null")
    return any(getattr(types, f"is_{each}")(kind) for each in plain)


def needs(package: str, source: object) -> Any:
    """Returns the module of an optional package. Raises DataError: it is not installed, and what to do."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(f"reading it needs {package}: pip install 'art-cli[data]'", source) from None
