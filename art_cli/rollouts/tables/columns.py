"""Columns: maps table columns to scenario keys, and chooses the id."""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from art_cli.runtime.errors import DataError, brief, printable
from art_cli.runtime.processes.plain_json import MAX_CHAT_DEPTH, is_deep

log = logging.getLogger(__name__)

Json = dict[str, Any]

MAX_ROWS = 1_000_000  # same limit as for functions
MAX_CELL = 16 * 2**20  # maximum characters of a cell; a million tokens of text are about 4 million characters
MAX_BYTES = 2 * 2**30  # maximum bytes of all scenarios as JSON, because scenarios stay in memory
MAX_LISTED = 12  # maximum columns named in an error


class TableRow(NamedTuple):
    """A table row. Example: TableRow("tasks.csv:3", {"question": "2+2", "answer": "4"})."""

    place: str  # location for error messages
    values: Json  # column -> value; includes at least the requested columns


class Columns:
    """Example: Columns({"question": "prompt", "id": "task"}) takes the columns `prompt` and `task`.

    An empty mapping takes every column under its own name.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapping = dict(mapping)

    @property
    def is_chosen(self) -> bool:
        return bool(self._mapping)

    def wanted(self, there: Sequence[str], source: object) -> list[str]:
        """Returns the columns to read, in the table's order. Raises DataError for missing, repeated or empty names."""
        chosen = set(self._mapping.values()) or set(there)
        for name in self._mapping.values():
            if name not in there:
                raise DataError(_no_column(name, there), source)
        twice = [name for name, count in Counter(there).items() if count > 1 and name in chosen]
        if twice:
            raise DataError(f"two columns are called {brief(twice[0])}; give each a different name", source)
        if "" in chosen:
            place = list(there).index("") + 1
            raise DataError(
                f"column {place} has no name (pandas writes its index so); give it one, or name those to take in "
                "`columns`",
                source,
            )
        return [name for name in there if name in chosen]

    def scenarios(self, rows: Iterable[TableRow], source: object) -> list[Json]:
        """Returns a scenario for each row, starting with its `id`.

        The id comes from the column named or mapped to `id`. Without such a column the id is a hash of the scenario's
        content, independent of other rows and their order; duplicate rows are dropped.

        Raises DataError for missing columns, non-JSON values, duplicate ids, and too many or too large rows.
        """
        found: dict[str, tuple[Json, str]] = {}  # id as text -> (scenario, place)
        num_bytes = num_equal = 0
        for number, row in enumerate(rows, 1):
            if number > MAX_ROWS:
                raise DataError(f"more than {MAX_ROWS} rows", source)
            scenario = self._scenario(row)
            text = json.dumps(scenario, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            num_bytes += len(text)
            if num_bytes > MAX_BYTES:
                raise DataError(f"the rows are larger than {MAX_BYTES >> 30} GiB together", source)
            if is_derived := "id" not in scenario:
                scenario = {"id": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16], **scenario}
            name = str(scenario["id"])
            if name not in found:
                found[name] = (scenario, row.place)
            elif is_derived:
                num_equal += 1
            else:
                raise DataError(f"the id {brief(scenario['id'])} is there already, at {found[name][1]}", row.place)
        if num_equal:
            log.warning("%s: skipped %d duplicate rows", source, num_equal)
        return [scenario for scenario, _ in found.values()]

    def _scenario(self, row: TableRow) -> Json:
        scenario: Json = {}
        check_depth(row.values, row.place)
        for key, column in self._mapping.items() or zip(row.values, row.values, strict=True):
            if column not in row.values:
                raise DataError(_no_column(column, list(row.values)), row.place)
            value = row.values[column]
            if problem := _refusal(value):
                cure = "mend it in the source, or leave the column out with `columns`"
                raise DataError(f"column {brief(column)} holds {problem}; {cure}", row.place)
            scenario[key] = value
        if "id" in scenario:
            check_id(scenario["id"], row.place)
            scenario = {"id": scenario.pop("id"), **scenario}
        return scenario


def check_id(id: object, source: object, line: int | None = None) -> None:
    """Raises DataError for an invalid scenario id."""
    if not isinstance(id, str | int) or isinstance(id, bool) or id == "":
        raise DataError(f'"id" is a string or a whole number, not {brief(id)}', source, line)


def check_depth(scenario: Json, source: object, line: int | None = None) -> None:
    """Raises DataError for a scenario with too many nesting levels."""
    if is_deep(scenario, MAX_CHAT_DEPTH):
        raise DataError(f"nested deeper than {MAX_CHAT_DEPTH} levels", source, line)


def _no_column(name: str, there: Sequence[str]) -> str:
    near = get_close_matches(name, there, n=1)
    hint = f"did you mean {brief(near[0])}? " if near else ""
    listed = ", ".join(printable(each, limit=40) for each in there[:MAX_LISTED])
    return f"no column {brief(name)}; {hint}There are: {listed}{', ...' if len(there) > MAX_LISTED else ''}"


def _refusal(value: object) -> str | None:
    """Describes a value that JSON cannot represent. Example: "NaN, which JSON has not"."""
    match value:
        case None | bool():
            return None
        case str():
            return None if len(value) <= MAX_CELL else f"more than {MAX_CELL >> 20} Mi characters"
        case int():
            return None if -(2**63) <= value < 2**64 else "a whole number of more than 64 bits"
        case float():
            return None if math.isfinite(value) else f"{value}, which JSON has not".replace("nan", "NaN")
        case list():
            return next((problem for each in value if (problem := _refusal(each))), None)
        case dict():
            if not all(isinstance(key, str) for key in value):
                return "a map whose keys are not text"
            return next((problem for each in value.values() if (problem := _refusal(each))), None)
    return f"a {type(value).__name__}, which JSON has not"
