"""Loads scenarios from files and functions: training and held-out scenarios, their overlap, and the play order.

A scenario is a JSON object with an `id`. With `eval.held_out` the training and evaluation scenarios are disjoint parts
of the same set. The hash of the scenario's id decides its part, so adding or reordering scenarios moves no scenario to
the other part.
"""

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.config.schema import RunConfig
from art_cli.config.sections.rollout_config import ScenariosConfig
from art_cli.rollouts import environments
from art_cli.rollouts.tables import Columns, TableRow, is_table, table_scenarios
from art_cli.rollouts.tables.columns import Json, check_depth, check_id
from art_cli.runs import json_lines
from art_cli.runtime.errors import DataError, brief, describe
from art_cli.runtime.lots import is_drawn
from art_cli.runtime.plugins import resolve

MAX_SCENARIOS = 1_000_000  # larger iterables are assumed to be endless


def load_scenarios(source: str | ScenariosConfig, directory: Path) -> list[Json]:
    """Loads a source's scenarios in order: a file, dataset, query, "file.py:function", or "module:function".

    A plain string is a source without other settings. Paths are relative to `directory`. Raises DataError for a missing
    file, an invalid line, row, or item, a duplicate id, or an empty source, and UsageError if the function cannot be
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
    return ":" in source.source and not (directory / source.source).exists() and not is_table(source, directory)


def _read(path: Path, columns: Columns) -> list[Json]:
    if not path.is_file():
        hint = "a dataset of the hub needs `split`"
        raise DataError(f"no such file; scenarios come from a file or 'file.py:function'; {hint}", path)
    if columns.is_chosen or not any("id" in scenario for _, scenario in _lines(path)):
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
    decoder = msgspec.json.Decoder()
    for number, _, line in json_lines.lines(path):
        try:
            item = json_lines.decode(line, decoder, mends_numbers=False)
        except ValueError as error:
            raise DataError(f"not a JSON object on one line: {error}", path, number) from None
        yield number, _an_object(item, path, number)


def _call(spec: str, directory: Path, columns: Columns) -> list[Json]:
    made = resolve(spec, base=directory)
    try:
        items = made() if callable(made) else made
        if inspect.isawaitable(items) or isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
            raise DataError(f"expected an iterable of objects with an id, not {type(items).__name__}", spec)
        items = list(islice(items, MAX_SCENARIOS + 1))
        if columns.is_chosen or not any(isinstance(item, dict) and "id" in item for item in items):
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
        raise DataError('the scenario has no "id", and others have one; give it one, or remove theirs', source, line)
    check_id(scenario["id"], source, line)
    check_depth(scenario, source, line)
    return scenario


def _an_object(value: Any, source: object, line: int | None = None) -> Json:
    if not isinstance(value, dict):
        cure = "; write one object per line (jq -c '.[]' FILE)" if isinstance(value, list) else ""
        raise DataError(f"a scenario is a JSON object, not {brief(value)}{cure}", source, line)
    return value


def pools_of(scenarios: Sequence[Json], key: str | None) -> list[str]:
    """Returns each scenario's value of `key`, or its id for None. Raises DataError unless it is text or a number."""
    if key is None:
        return [str(scenario["id"]) for scenario in scenarios]
    for scenario in scenarios:
        if not isinstance(scenario.get(key), str | int | float):
            what = brief(scenario[key]) if key in scenario else "missing"
            raise DataError(f"scenario {brief(scenario['id'])}: {key!r}, which rollout.pool names, is {what}", "pool")
    return [str(scenario[key]) for scenario in scenarios]


class ScenarioOrder:
    """Chooses each step's scenarios. Each epoch has a new seeded order.

    A pure function of ids, seed, and step, so a resumed run needs no saved state. With `shuffle` the order of the ids
    does not matter.
    """

    def __init__(self, ids: Sequence[str | int], *, seed: int, shuffle: bool = True) -> None:
        assert ids, "no scenarios to order"
        self._ids = [str(id) for id in ids]
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = lru_cache(maxsize=2)(self._order)  # a step rarely spans more than two epochs

    def groups(self, step: int, groups_per_step: int, num_spare: int = 0, *, first: int | None = None) -> list[int]:
        """Returns indices into `ids`: the step's scenarios, followed by `num_spare` scenarios for refills.

        A step that is longer than an epoch repeats scenarios. Spare scenarios that the step already plays come last.
        With `shuffle` the next step starts after the spare scenarios, so no scenario repeats within an epoch, and
        unused spare scenarios wait for the next epoch. Without `shuffle` the next step starts with the spare scenarios,
        because a fixed order could skip the same scenarios forever.

        `first` is the position of the step's first scenario; None means that all steps have equal size.
        """
        if first is None:
            first = step * self.stride(groups_per_step, num_spare)
        positions = range(first, first + groups_per_step + num_spare)
        chosen = [self._epoch(position // len(self._ids))[position % len(self._ids)] for position in positions]
        own, spare = chosen[:groups_per_step], chosen[groups_per_step:]
        return own + sorted(spare, key=set(own).__contains__)

    def stride(self, groups_per_step: int, num_spare: int) -> int:
        """Returns the distance from a step's first scenario to the next step's first scenario."""
        return groups_per_step + num_spare if self._shuffle else groups_per_step

    def _order(self, epoch: int) -> list[int]:
        """Returns the epoch's permutation, sorted by a hash of seed, epoch, and id."""
        indices = list(range(len(self._ids)))
        if not self._shuffle:
            return indices
        keys = [hashlib.sha256(f"{self._seed}/{epoch}/{id}".encode()).digest() for id in self._ids]
        return sorted(indices, key=keys.__getitem__)


class Overlap(NamedTuple):
    """The ids of evaluation scenarios that are trained on as well."""

    same_id: list[str]
    same_content: list[str]  # ids of scenarios that equal a training scenario except for the id

    def __str__(self) -> str:
        """Example: "2 of the evaluation's scenarios are trained on as well (easy-1, easy-2)"; "": none are."""
        parts = []
        if self.same_id:
            parts.append(
                f"{len(self.same_id)} of the evaluation's scenarios are trained on as well{_few(self.same_id)}"
            )
        if self.same_content:
            few = _few(self.same_content)
            parts.append(f"{len(self.same_content)} more equal a training scenario except for the id{few}")
        return "; ".join(parts)


def is_held_out(id: str | int, share: float) -> bool:
    return is_drawn(f"held out/{id}", share)


class RunScenarios:
    """The scenarios of a configuration. Files are read and functions called once, on first use. `by_source` has the
    sources.

    Attributes raise DataError or UsageError like `load_scenarios`, and DataError if no scenario remains.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.directory = config, directory

    @cached_property
    def by_source(self) -> "dict[str, RunScenarios]":
        """Scenarios by source; without sources the key is ""."""
        parts = self.config.by_source.items()
        return {name: RunScenarios(part, self.directory) if name else self for name, part in parts}

    @property
    def training_by_source(self) -> dict[str, list[Json]]:
        return {name: part.training for name, part in self.by_source.items()}

    @property
    def evaluation_by_source(self) -> dict[str, list[Json]]:
        return {name: part.evaluation for name, part in self.by_source.items()}

    @cached_property
    def training(self) -> list[Json]:
        """The scenarios to train on, in order."""
        return self._part(is_evaluation=False)

    @cached_property
    def evaluation(self) -> list[Json]:
        """The scenarios to evaluate on, in order."""
        assert self.config.eval is not None, "no eval section"
        if self.config.eval.scenarios is not None:
            return load_scenarios(self.config.eval.scenarios, self.directory)
        return self._part(is_evaluation=True)

    @cached_property
    def _whole(self) -> list[Json]:
        rollout = self.config.rollout
        if rollout.scenarios is not None:
            return load_scenarios(rollout.scenarios, self.directory)
        assert rollout.environment is not None, "a rollout without scenarios has an environment"
        return list(environments.seeds(rollout.environment.seed, rollout.environment.size))

    def _part(self, *, is_evaluation: bool) -> list[Json]:
        config, scenarios = self.config, self._whole
        share = config.eval.held_out if config.eval is not None else None
        if share is None:
            return scenarios
        part = [scenario for scenario in scenarios if is_held_out(scenario["id"], share) == is_evaluation]
        if not part:
            what = "to evaluate on" if is_evaluation else "to train on"
            raise DataError(
                f"eval.held_out = {share:g} of {len(scenarios)} scenarios leaves none {what}; "
                "choose another share, or name a file in eval.scenarios",
                config.rollout.scenarios.source if config.rollout.scenarios else "rollout.environment",
            )
        return part


def find_overlap(training: Sequence[Json], evaluation: Sequence[Json]) -> Overlap:
    """Finds evaluation scenarios that are also in the training set.

    Contents are compared only if they are unique within each set. Otherwise the id itself determines the task (a seed,
    for example), and scenarios with equal content are different tasks.
    """
    ids = {str(scenario["id"]) for scenario in training}
    same_id = [str(scenario["id"]) for scenario in evaluation if str(scenario["id"]) in ids]
    trained, held_out = (
        [json.dumps({key: value for key, value in each.items() if key != "id"}, sort_keys=True) for each in scenarios]
        for scenarios in (training, evaluation)
    )
    if len(set(trained)) < len(trained) or len(set(held_out)) < len(held_out):
        return Overlap(same_id, [])
    known = set(trained)
    alike = [str(scenario["id"]) for scenario, text in zip(evaluation, held_out, strict=True) if text in known]
    return Overlap(same_id, [id for id in alike if id not in ids])


def _few(ids: Sequence[str]) -> str:
    """Example: " (easy-1, easy-2, easy-3, ...)"."""
    return f" ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
