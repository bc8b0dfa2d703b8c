"""The section `scenarios` of `rollout` and `eval`: the source of scenarios."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, model_serializer, model_validator

from art_cli.config.sections.base_config import Seconds, Section

SAVED = ("state.json", "dataset_dict.json")  # one of them is in each directory that a dataset was saved to


class ScenariosConfig(Section):
    """The source of scenarios and the columns of a table that make them up (docs/scenarios.md). A source alone
    stands for {source: ...}."""

    source: str
    """A file (JSON lines, CSV, Parquet, SQLite, DuckDB), a directory written by `save_to_disk` of the library
    datasets, a dataset of the Hugging Face hub, or "file.py:function" that returns an iterable of objects with an
    `id`."""
    columns: dict[str, str] = {}
    """The keys of a scenario, each with its column: {id: number, question: text}. Without an `id`, the id is a hash
    of the scenario. {}: all columns by their names."""
    query: str | None = None
    """A SELECT on a SQLite or DuckDB file, which is opened read-only. Its columns are those of the table."""
    timeout_s: Seconds = 60.0
    """The longest time for the query."""
    split: str | None = None
    """The split of a dataset, such as "train" or "train[:500]". A source that is neither a file nor a directory is then
    one of the hub."""
    subset: str | None = None
    """The subset (configuration) of a dataset of the hub."""
    revision: str | None = None
    """The branch, tag or commit of a dataset of the hub. A commit never changes."""

    @model_validator(mode="after")
    def _one_kind_of_source(self) -> Self:
        if self.query is not None and self.split is not None:
            raise ValueError("'query' is for a database, 'split' for a dataset; leave one of them out")
        if self.split is None and (self.subset or self.revision):
            raise ValueError("'subset' and 'revision' are for a dataset of the hub, which needs 'split' too")
        if self.query is None and "timeout_s" in self.model_fields_set:
            raise ValueError("'timeout_s' is the time for a 'query'; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> Any:
        """Dumps a source alone as it was written, so that the records of older runs stay the same."""
        return self.source if self == ScenariosConfig(source=self.source) else dump(self)


def _by_source(value: Any) -> Any:
    """Returns the section for a source that stands alone."""
    is_alone = isinstance(value, str | int | float) and not isinstance(value, bool)
    return {"source": value} if is_alone else value


Scenarios = Annotated[ScenariosConfig, BeforeValidator(_by_source)]


def is_dataset(path: Path) -> bool:
    """Whether it is a directory that `save_to_disk` of the library datasets wrote."""
    return any((path / name).is_file() for name in SAVED)
