"""Reads scenarios, and chooses those that a step plays. A scenario is a JSON object with an `id`."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.sections.scenarios_config import ScenariosConfig
from art_cli.rollouts.tables import Columns, TableRow, is_table, table_scenarios
from art_cli.rollouts.tables.columns import brief, check_id
from art_cli.runs import json_lines
from art_cli.runtime.errors import DataError, describe
from art_cli.runtime.plugins import resolve

Json = dict[str, Any]

MAX_SCENARIOS = 1_000_000  # an iterable with more is taken to be endless


def load_scenarios(source: str | ScenariosConfig, directory: Path) -> list[Json]:
    """Returns the scenarios of a source, in order: a file, a dataset, a query, "file.py:function" or "module:function".

    A plain string is a source without further settings. Paths are relative to `directory`. Raises DataError: no such
    file, a line, row or item that is no scenario, an id twice, none at all; UsageError where the function cannot be
    loaded.
    """
    source = ScenariosConfig(source=source) if isinstance(source, str) else source
    path = directory / source.source
    if is_table(source, directory):
        scenarios = table_scenarios(source, directory)
    elif is_function(source, directory):
        scenarios = _call(source.source, directory, Columns(source.columns))
    else:
        scenarios = _read(path, Columns(source.columns))
    if not scenarios:
        raise DataError("no scenarios; at least one is needed", source.source if ":" in source.source else path)
    return scenarios


def is_function(source: ScenariosConfig, directory: Path) -> bool:
    """Returns whether the scenarios are made by a Python function when they are needed."""
    return ":" in source.source and not (directory / source.source).exists() and not is_table(source, directory)


def _read(path: Path, columns: Columns) -> list[Json]:
    if not path.is_file():
        hint = "a dataset of the hub needs `split`"
        raise DataError(f"no such file; `rollout.scenarios` names a file of them or 'file.py:function'; {hint}", path)
    if columns.is_chosen:
        return columns.scenarios((TableRow(f"{path}:{number}", item) for number, item in _lines(path)), path)
    scenarios: list[Json] = []
    lines: dict[str, int] = {}  # id -> line
    for number, scenario in _lines(path):
        scenarios.append(_check(scenario, path, number))
        first = lines.setdefault(str(scenario["id"]), number)
        if first != number:
            raise DataError(f"the id {brief(scenario['id'])} is there already, in line {first}", path, number)
    return scenarios


def _lines(path: Path) -> Iterator[tuple[int, Json]]:
    """(number, object) of each line."""
    decoder = msgspec.json.Decoder()
    for number, _, line in json_lines.lines(path):
        try:
            item = json_lines.decode(line, decoder)
        except ValueError as error:
            raise DataError(f"not a JSON object on one line: {error}", path, number) from None
        yield number, _an_object(item, path, number)


def _call(spec: str, directory: Path, columns: Columns) -> list[Json]:
    made = resolve(spec, base=directory)
    try:
        items = made() if callable(made) else made
        if inspect.isawaitable(items) or isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
            raise DataError(f"expected an iterable of objects with an id, not {type(items).__name__}", spec)
        if columns.is_chosen:
            rows = (TableRow(place := f"{spec}, item {n}", _an_object(item, place)) for n, item in enumerate(items, 1))
            return columns.scenarios(rows, spec)
        return _collect(items, spec)
    except DataError:
        raise
    except Exception as error:  # the boundary to the user's function
        raise DataError(f"it raised {describe(error)}", spec) from error


def _collect(items: Iterable[Any], spec: str) -> list[Json]:
    scenarios: dict[str, Json] = {}
    for number, item in enumerate(items, 1):
        if number > MAX_SCENARIOS:
            raise DataError(f"more than {MAX_SCENARIOS} scenarios; does the iterable end?", spec)
        scenario = _check(item, f"{spec}, item {number}")
        try:
            msgspec.json.encode(scenario)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"a scenario is plain JSON data: {error}", f"{spec}, item {number}") from None
        if str(scenario["id"]) in scenarios:
            raise DataError(f"the id {brief(scenario['id'])} is there already", f"{spec}, item {number}")
        scenarios[str(scenario["id"])] = scenario
    return list(scenarios.values())


def _check(value: Any, source: object, line: int | None = None) -> Json:
    scenario = _an_object(value, source, line)
    if "id" not in scenario:
        raise DataError('the scenario has no "id"', source, line)
    check_id(scenario["id"], source, line)
    return scenario


def _an_object(value: Any, source: object, line: int | None = None) -> Json:
    if not isinstance(value, dict):
        raise DataError(f"a scenario is a JSON object, not {type(value).__name__}", source, line)
    return value


def pools_of(scenarios: Sequence[Json], key: str | None) -> list[str]:
    """Returns the pool of each scenario: its value of `key`; its id where `key` is None.

    Raises DataError: a scenario has no such key, or a value that is not a string or a number.
    """
    if key is None:
        return [str(scenario["id"]) for scenario in scenarios]
    for scenario in scenarios:
        if not isinstance(scenario.get(key), str | int | float):
            what = brief(scenario[key]) if key in scenario else "missing"
            raise DataError(f"scenario {brief(scenario['id'])}: {key!r}, which rollout.pool names, is {what}", "pool")
    return [str(scenario[key]) for scenario in scenarios]


class ScenarioOrder:
    """The scenarios that each step plays. Epochs follow each other, each in a new seeded order.

    A pure function of ids, seed and step, so that a resumed run needs to remember nothing. With `shuffle` it does not
    depend on the order of the ids either.
    """

    def __init__(self, ids: Sequence[str | int], *, seed: int, shuffle: bool = True) -> None:
        assert ids, "no scenarios to order"
        self._ids = [str(id) for id in ids]
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = lru_cache(maxsize=2)(self._order)  # a step seldom spans more than two

    def groups(self, step: int, groups_per_step: int, num_spare: int = 0) -> list[int]:
        """Indices in `ids` of the scenarios that a step plays, then of the `num_spare` that it may refill with.

        A step longer than an epoch plays some twice. Spare ones that the step has already come last. With `shuffle`
        the next step begins after the spare ones, so that no scenario comes twice in an epoch; those that were not
        needed wait for another epoch. Without it the next step begins with the spare ones, because in a fixed order
        the same scenarios might never be needed.
        """
        stride = groups_per_step + num_spare if self._shuffle else groups_per_step
        positions = range(step * stride, step * stride + groups_per_step + num_spare)
        chosen = [self._epoch(position // len(self._ids))[position % len(self._ids)] for position in positions]
        own, spare = chosen[:groups_per_step], chosen[groups_per_step:]
        return own + sorted(spare, key=set(own).__contains__)

    def _order(self, epoch: int) -> list[int]:
        """Returns the permutation of one epoch, sorted by the hash of seed, epoch and id."""
        indices = list(range(len(self._ids)))
        if not self._shuffle:
            return indices
        keys = [hashlib.sha256(f"{self._seed}/{epoch}/{id}".encode()).digest() for id in self._ids]
        return sorted(indices, key=keys.__getitem__)
