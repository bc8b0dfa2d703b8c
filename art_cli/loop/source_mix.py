"""SourceMix: mixes each step's groups from the sources in `rollout.sources` by weight.

Every place in every step belongs to the source furthest behind its share so far. The shares are therefore
exact after each full period of the weights, no source is ever a whole group ahead, and the order depends only on the
weights. A resumed run has the same mix, because played groups do not matter.

    weights {a: 2, b: 1}, 4 groups per step    ->    a b a a | b a a b | a a b a | ...

A run without sources has a single source named "".
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice

from art_cli.config.schema import RunConfig
from art_cli.loop.owed_groups import GroupPlace
from art_cli.loop.scenario_choice import ScenarioChoice
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, ScoredTrajectory


def places(weights: Mapping[str, float]) -> Iterator[str]:
    """Yields the source of each place, endlessly. Ties go to the source listed first."""
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * scale) for name, weight in exact.items()}
    total, behind = sum(whole.values()), dict.fromkeys(whole, 0)
    while True:
        for name, weight in whole.items():
            behind[name] += weight
        chosen = max(behind, key=behind.__getitem__)
        behind[chosen] -= total
        yield chosen


class SourceMix:
    """The choices of all sources together."""

    def __init__(self, config: RunConfig, run: RunDir, scenarios: Mapping[str, Sequence[Json]]) -> None:
        """`scenarios` maps sources to scenarios. Raises DataError like `ScenarioChoice`."""
        rollout = config.rollout
        self._size = rollout.groups_per_step
        self._places = places({name: source.weight for name, source in sorted(rollout.sources.items())} or {"": 1.0})
        self._steps: list[list[str]] = []  # sources of each step's places, computed on demand
        self._choices = {
            name: ScenarioChoice(part, run, scenarios[name], source=name, size_of=partial(self._size_of, name))
            for name, part in config.by_source.items()
        }

    def _size_of(self, source: str, step: int) -> int:
        return self.sources(step).count(source)

    def sources(self, step: int) -> list[str]:
        """Returns the source of each place in the step."""
        while len(self._steps) <= step:
            self._steps.append(list(islice(self._places, self._size)))
        return self._steps[step]

    def places(self, step: int) -> tuple[list[GroupPlace], list[GroupPlace]]:
        """Returns the places of the step's own groups, and the places for refills, in playing order."""
        chosen = {name: iter(choice.scenarios(step)) for name, choice in self._choices.items()}
        own = [GroupPlace(name, next(chosen[name])) for name in self.sources(step)]
        spare = [
            GroupPlace(name, scenario)
            for name, choice in self._choices.items()
            for scenario in islice(chosen[name], choice.num_spare(step))
        ]
        return own, spare

    def note(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Records the rewards of a finished step's groups for later choices."""
        for choice in self._choices.values():
            choice.note(step, groups)
