"""The scenarios to train on, those held out for evaluation, and the overlap of the two.

With `eval.held_out` the two are parts of one set, disjoint by construction: the hash of a scenario's id decides its
part, whatever other scenarios there are and in which order. So a scenario that is added later moves no other.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from art_cli.config.schema import RunConfig
from art_cli.rollouts import environments
from art_cli.rollouts.scenario_files import Json, load_scenarios
from art_cli.runtime.errors import DataError


class Overlap(NamedTuple):
    """The ids of evaluation scenarios that are trained on as well."""

    same_id: list[str]
    same_content: list[str]  # equal in all but the id to a scenario that is trained on

    def __str__(self) -> str:
        """Example: "2 of the evaluation's scenarios are trained on as well (easy-1, easy-2)"; "": none are."""
        parts = []
        if self.same_id:
            parts.append(
                f"{len(self.same_id)} of the evaluation's scenarios are trained on as well{_few(self.same_id)}"
            )
        if self.same_content:
            few = _few(self.same_content)
            parts.append(f"{len(self.same_content)} more differ only by their id from one that is trained on{few}")
        return "; ".join(parts)


def is_held_out(id: str | int, share: float) -> bool:
    """Returns whether the scenario with that id belongs to the held-out share of its set."""
    return int.from_bytes(hashlib.sha256(f"held out/{id}".encode()).digest()[:8]) < share * 2**64


class RunScenarios:
    """The scenarios of a configuration. Each file is read once, when it is first needed, and each function called once.

    Every attribute raises DataError or UsageError as `load_scenarios` does, and DataError if no scenario is left.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.directory = config, directory

    @cached_property
    def training(self) -> list[Json]:
        """The scenarios to train on, in order."""
        return _part(self.config, self._whole, is_evaluation=False)

    @cached_property
    def evaluation(self) -> list[Json]:
        """The scenarios to evaluate on, in order."""
        assert self.config.eval is not None, "no eval section"
        if self.config.eval.scenarios is not None:
            return load_scenarios(self.config.eval.scenarios, self.directory)
        return _part(self.config, self._whole, is_evaluation=True)

    @cached_property
    def _whole(self) -> list[Json]:
        return _all(self.config, self.directory)


def training_scenarios(config: RunConfig, directory: Path) -> list[Json]:
    """Returns `RunScenarios.training`."""
    return RunScenarios(config, directory).training


def evaluation_scenarios(config: RunConfig, directory: Path) -> list[Json]:
    """Returns `RunScenarios.evaluation`."""
    return RunScenarios(config, directory).evaluation


def _part(config: RunConfig, scenarios: list[Json], *, is_evaluation: bool) -> list[Json]:
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


def _all(config: RunConfig, directory: Path) -> list[Json]:
    if config.rollout.scenarios is not None:
        return load_scenarios(config.rollout.scenarios, directory)
    assert config.rollout.environment is not None, "a rollout without scenarios has an environment"
    return list(environments.seeds(config.rollout.environment.seed, config.rollout.environment.size))


def find_overlap(training: Sequence[Json], evaluation: Sequence[Json]) -> Overlap:
    """Returns the evaluation's scenarios that are trained on.

    Contents are compared only if they differ within each set. Otherwise the id itself names what is played
    (a seed, for example), and scenarios with equal content are different ones.
    """
    ids = {str(scenario["id"]) for scenario in training}
    same_id = [str(scenario["id"]) for scenario in evaluation if str(scenario["id"]) in ids]
    trained, held_out = ([_content(scenario) for scenario in each] for each in (training, evaluation))
    if len(set(trained)) < len(trained) or len(set(held_out)) < len(held_out):
        return Overlap(same_id, [])
    known = set(trained)
    alike = [str(scenario["id"]) for scenario, text in zip(evaluation, held_out, strict=True) if text in known]
    return Overlap(same_id, [id for id in alike if id not in ids])


def _content(scenario: Json) -> str:
    return json.dumps({key: value for key, value in scenario.items() if key != "id"}, sort_keys=True)


def _few(ids: Sequence[str]) -> str:
    """Example: " (easy-1, easy-2, easy-3, ...)"."""
    return f" ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
