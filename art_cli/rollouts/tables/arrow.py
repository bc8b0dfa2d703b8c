"""Parquet files and Hugging Face datasets (hub, local cache, or saved): Arrow rows as plain values."""

import importlib
import json
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from art_cli.config.sections.rollout_config import ScenariosConfig
from art_cli.rollouts.tables.columns import MAX_BYTES, MAX_ROWS, Columns, Json, TableRow
from art_cli.runtime.errors import DataError, describe, printable

BATCH_ROWS = 64  # rows converted together
LARGE_BATCH = 64 * 2**20  # batch size in bytes above which rows are converted one by one
FORMATS = {"arrow", "cache", "csv", "json", "parquet", "text"}  # `datasets` builders that only read plain data
COMMIT = re.compile("[0-9a-f]{40}")


def parquet_rows(path: Path, columns: Columns) -> Generator[TableRow]:
    """Yields a Parquet file's rows. Raises DataError for other formats, non-JSON types, oversized values, or damage."""
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
            raise DataError(f"more than {MAX_BYTES >> 30} GiB when it is decompressed", path)
        yield from plain_rows(file.iter_batches(BATCH_ROWS, columns=wanted), path)


def plain_rows(batches: Iterator[Any], source: object) -> Generator[TableRow]:
    """Yields the rows of Arrow's record batches. Raises DataError: a batch cannot be read."""
    number = 0
    while True:
        try:
            batch = next(batches, None)
            values = iter(()) if batch is None else iter(_values(batch))
        except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors, or OSErrors for damaged pages
            raise DataError(f"damaged after row {number}: {describe(error)}", source) from None
        if batch is None:
            return
        while True:
            try:
                row = next(values, None)
            except ValueError as error:  # invalid JSON in a JSON column
                raise DataError(f"row {number + 1}: {describe(error)}", source) from None
            if row is None:
                break
            number += 1
            yield TableRow(f"{source}, row {number}", row)


def _values(batch: Any) -> Iterable[Json]:
    """Returns a batch's rows. Rows of large batches are converted lazily, because conversion copies the data."""
    with_texts = {field.name: field.type for field in batch.schema if "arrow.json" in str(field.type)}
    small = batch.nbytes < LARGE_BATCH
    rows = batch.to_pylist() if small else (batch.slice(at, 1).to_pylist()[0] for at in range(batch.num_rows))
    if not with_texts:
        return rows
    return ({name: _read_texts(value, with_texts.get(name)) for name, value in row.items()} for row in rows)


def check_types(schema: Any, wanted: Sequence[str], source: object) -> None:
    """Raises DataError: one of the columns has a type that JSON cannot hold."""
    for name in wanted:
        kind = schema.field(name).type
        if not _is_json(kind):
            cure = "cast it to text, or leave the column out with `columns`"
            raise DataError(
                f"column {name!r} is of type {printable(kind, limit=80)}, which JSON has not; {cure}", source
            )


def _is_text_of_json(kind: Any) -> bool:
    """Returns True for a column of JSON texts, as `datasets.Json()` writes it."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _read_texts(value: Any, kind: Any) -> Any:
    """Returns a plain value in which the JSON texts of `kind` are values."""
    types = importlib.import_module("pyarrow.types")
    if value is None or kind is None:
        return value
    if _is_text_of_json(kind):
        return json.loads(value)
    if types.is_struct(kind):
        return {field.name: _read_texts(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [_read_texts(item, kind.value_type) for item in value]
    return value


def _is_json(kind: Any) -> bool:
    types = importlib.import_module("pyarrow.types")
    if _is_text_of_json(kind):
        return True
    if types.is_struct(kind):
        return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json(kind.value_type)
    plain = ("boolean", "integer", "floating", "string", "large_string", "string_view", "null")
    return any(getattr(types, f"is_{each}")(kind) for each in plain)


def needs(package: str, source: object) -> Any:
    """Imports an optional package. Raises DataError with the install command if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(f"reading it needs {package}: pip install 'art-cli[data]'", source) from None


def dataset_rows(source: ScenariosConfig, path: Path, columns: Columns) -> Generator[TableRow]:
    """Yields a split's rows. Raises DataError: unknown or unreachable dataset or split, or dataset code."""
    datasets = needs("datasets", source.source)
    if int(datasets.__version__.split(".")[0]) < 4:
        raise DataError("datasets before 4 runs code of a dataset: pip install 'art-cli[data]'", source.source)
    table = _saved(datasets, source, path) if path.is_dir() else _of_hub(datasets, source)
    if table.num_rows > MAX_ROWS:
        raise DataError(f"{table.num_rows} rows; at most {MAX_ROWS} are read", source.source)
    wanted = columns.wanted(table.column_names, source.source)
    table = table.select_columns(wanted).with_format("arrow")
    check_types(table.features.arrow_schema, wanted, source.source)
    batches = (table[start : start + BATCH_ROWS] for start in range(0, table.num_rows, BATCH_ROWS))
    return plain_rows(batches, source.source)


def _saved(datasets: Any, source: ScenariosConfig, path: Path) -> Any:
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # the boundary to a library that raises anything for a damaged directory
        raise DataError(f"no dataset: {describe(error)}", path) from None
    if isinstance(table, datasets.Dataset):
        if source.split is not None:
            raise DataError("the dataset has only one split; remove `split`", path)
        return table
    if source.split is None or source.split not in table:
        what = "which split?" if source.split is None else f"no split {source.split!r}."
        raise DataError(f"{what} There are: {', '.join(table)}; set `split`", path)
    return table[source.split]


def _of_hub(datasets: Any, source: ScenariosConfig) -> Any:
    try:
        builder = datasets.load_dataset_builder(source.source, source.subset, revision=source.revision)
        kind = type(builder).__module__.rpartition(".")[2]
        if kind not in FORMATS:
            raise DataError(f"a dataset of format {kind!r}; there are: {', '.join(sorted(FORMATS))}", source.source)
        if kind == "cache" and COMMIT.fullmatch(source.revision or "") and builder.hash != source.revision:
            raise DataError(
                f"the hub cannot be reached, and the cache has another revision, {builder.hash}", source.source
            )
        builder.download_and_prepare()
        return builder.as_dataset(split=source.split)
    except DataError:
        raise
    except ConnectionError as error:
        cure = "without network it must be in the cache already, or name a directory that `save_to_disk` wrote"
        raise DataError(f"{describe(error)}; {cure}", source.source) from None
    except Exception as error:  # the boundary to a library that raises anything
        raise DataError(f"cannot be loaded from the hub: {describe(error)}", source.source) from None
