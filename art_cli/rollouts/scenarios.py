"""Reads scenarios, and says which ones a step plays. A scenario is a JSON object with an `id`."""

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from art_cli import json_lines
from art_cli.errors import DataError, describe, printable
from art_cli.plugins import resolve

Json = dict[str, Any]

MAX_SCENARIOS = 1_000_000  # an iterable with more is taken to be endless


def load_scenarios(spec: str, directory: Path) -> list[Json]:
    """The scenarios in a JSON-lines file, or those that "file.py:function" or "module:function" returns, in order.

    Paths are relative to `directory`. Raises DataError: no such file, a line or item that is not an object with an id,
    an id twice, none at all; UsageError where the function cannot be loaded.
    """
    path = directory / spec
    if path.is_file() or ":" not in spec:
        scenarios, source = _read(path), str(path)
    else:
        scenarios, source = _call(spec, directory), spec
    if not scenarios:
        raise DataError("no scenarios; at least one is needed", source)
    return scenarios


def _read(path: Path) -> list[Json]:
    if not path.is_file():
        raise DataError("no such file; `rollout.scenarios` names a JSON-lines file or 'file.py:function'", path)
    scenarios: list[Json] = []
    lines: dict[str, int] = {}  # id -> line
    decoder = msgspec.json.Decoder()
    for number, _, line in json_lines.lines(path):
        try:
            scenario = json_lines.decode(line, decoder)
        except ValueError as error:
            raise DataError(f"not a JSON object on one line: {error}", path, number) from None
        scenarios.append(_check(scenario, path, number))
        first = lines.setdefault(str(scenario["id"]), number)
        if first != number:
            raise DataError(f"the id {_brief(scenario['id'])} is there already, in line {first}", path, number)
    return scenarios


def _call(spec: str, directory: Path) -> list[Json]:
    made = resolve(spec, base=directory)
    try:
        items = made() if callable(made) else made
        if inspect.isawaitable(items) or isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
            raise DataError(f"expected an iterable of objects with an id, not {type(items).__name__}", spec)
        scenarios = _collect(items, spec)
    except DataError:
        raise
    except Exception as error:  # the boundary to the user's function
        raise DataError(f"it raised {describe(error)}", spec) from error
    return scenarios


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
            raise DataError(f"the id {_brief(scenario['id'])} is there already", f"{spec}, item {number}")
        scenarios[str(scenario["id"])] = scenario
    return list(scenarios.values())


def _check(value: Any, source: object, line: int | None = None) -> Json:
    if not isinstance(value, dict):
        raise DataError(f"a scenario is a JSON object, not {type(value).__name__}", source, line)
    if "id" not in value:
        raise DataError('the scenario has no "id"', source, line)
    if not isinstance(value["id"], str | int) or isinstance(value["id"], bool) or value["id"] == "":
        raise DataError(f'"id" is a string or a whole number, not {_brief(value["id"])}', source, line)
    return value


def pools_of(scenarios: Sequence[Json], key: str | None) -> list[str]:
    """The pool of each scenario: its value of `key`; its id where `key` is None.

    Raises DataError: a scenario has no such key, or a value that is not a string or a number.
    """
    if key is None:
        return [str(scenario["id"]) for scenario in scenarios]
    for scenario in scenarios:
        if not isinstance(scenario.get(key), str | int | float):
            what = _brief(scenario[key]) if key in scenario else "missing"
            raise DataError(f"scenario {_brief(scenario['id'])}: {key!r}, which rollout.pool names, is {what}", "pool")
    return [str(scenario[key]) for scenario in scenarios]


def _brief(value: object) -> str:
    """An id, short and printable, for an error."""
    return printable(repr(value), limit=80)


class ScenarioOrder:
    """Which scenarios each step plays. Epochs follow each other, each in a new seeded order.

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
        """The permutation of one epoch, sorted by the hash of seed, epoch and id."""
        indices = list(range(len(self._ids)))
        if not self._shuffle:
            return indices
        keys = [hashlib.sha256(f"{self._seed}/{epoch}/{id}".encode()).digest() for id in self._ids]
        return sorted(indices, key=keys.__getitem__)
