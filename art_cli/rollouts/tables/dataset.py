"""Datasets of Hugging Face: of the hub, of its cache on this machine, or saved to a directory."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

from art_cli.config.sections.rollout_config import ScenariosConfig
from art_cli.rollouts.tables.columns import MAX_ROWS, Columns, TableRow
from art_cli.rollouts.tables.parquet import BATCH_ROWS, check_types, needs, plain_rows
from art_cli.runtime.errors import DataError, describe

FORMATS = {"arrow", "cache", "csv", "json", "parquet", "text"}  # builders of `datasets` that only read plain data

COMMIT = re.compile("[0-9a-f]{40}")


def rows(source: ScenariosConfig, path: Path, columns: Columns) -> Generator[TableRow]:
    """Yields the rows of one split. Raises DataError: no such dataset or split, no network and no copy, or code."""
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
            raise DataError("a dataset of one split; leave `split` out", path)
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
