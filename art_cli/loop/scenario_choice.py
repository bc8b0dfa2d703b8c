"""ScenarioChoice: chooses the scenarios each step plays, from seed, step and earlier steps' files."""

from collections.abc import Callable, Sequence

from art_cli.config.schema import RolloutConfig, RunConfig
from art_cli.rollouts.adaptive import AdaptiveOrder
from art_cli.rollouts.scenario_files import ScenarioOrder, pools_of
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import GroupRewards, Json, ScoredTrajectory


class ScenarioChoice:
    """Chooses scenarios for a whole run or a single source. Each past step's files are read once."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        scenarios: Sequence[Json],
        *,
        source: str = "",
        size_of: Callable[[int], int] | None = None,
    ) -> None:
        """`size_of`: a step's groups (groups_per_step). Raises DataError if a scenario lacks the key `rollout.pool`."""
        self._config, self._run, self._scenarios, self._source = config, run, scenarios, source
        self._size_of = size_of or (lambda step: config.rollout.groups_per_step)
        self._firsts = [0]  # position of each step's first scenario in the epochs, computed on demand
        self._pools = pools_of(scenarios, config.rollout.pool)
        ids, seed = [str(scenario["id"]) for scenario in scenarios], config.train.seed
        self._epochs = ScenarioOrder(ids, seed=seed, shuffle=config.rollout.shuffle)
        self._adaptive = AdaptiveOrder(ids, seed=seed, pools=self._pools)
        self._history: dict[int, list[GroupRewards]] = {}

    def scenarios(self, step: int) -> list[Json]:
        """Returns the scenarios for the step's groups, then for refills; [] without groups."""
        rollout = self._rollout(step)
        if not rollout.groups_per_step:
            return []
        if rollout.choose == "epochs":
            chosen = self._epochs.groups(step, rollout.groups_per_step, rollout.num_spare, first=self._first(step))
        else:
            chosen = self._adaptive.groups(step, rollout.groups_per_step, rollout.num_spare, self.history(step))
        return [self._scenarios[index] for index in chosen]

    def num_spare(self, step: int) -> int:
        """Returns the step's maximum number of refills."""
        return self._rollout(step).num_spare

    def _rollout(self, step: int) -> RolloutConfig:
        return self._config.rollout.model_copy(update={"groups_per_step": self._size_of(step)})

    def _first(self, step: int) -> int:
        while len(self._firsts) <= step:
            past = self._rollout(len(self._firsts) - 1)
            self._firsts.append(self._firsts[-1] + self._epochs.stride(past.groups_per_step, past.num_spare))
        return self._firsts[step]

    def history(self, step: int) -> dict[int, list[GroupRewards]]:
        """Returns the groups of all earlier steps that are certainly finished when `step` begins.

        With `train.max_staleness`, a step may begin while previous steps are running. The predecessors are always
        ignored, so a resumed run makes the same choices.
        """
        num = max(0, step - self._config.train.max_staleness)
        for past in range(num):
            if past not in self._history:
                played = self._run.group_rewards(past)
                self._history[past] = [each for each in played if (each.source or "") == self._source]
        return {past: self._history[past] for past in range(num)}

    def note(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Records the rewards of a finished step's groups for later steps, in addition to other sources' rewards."""
        if self._config.rollout.choose == "epochs":
            return
        pools = dict(zip((str(scenario["id"]) for scenario in self._scenarios), self._pools, strict=True))
        own = [_rewards_of(members, pools) for members in groups if (members[0].source or "") == self._source]
        others = [each for each in self._run.group_rewards(step) if self._source and each.source != self._source]
        self._run.write_group_rewards(step, [*others, *own])


def _rewards_of(members: Sequence[ScoredTrajectory], pools: dict[str, str]) -> GroupRewards:
    scenario = str(members[0].scenario.get("id"))
    return GroupRewards(
        group_id=members[0].group_id,
        scenario=scenario,
        pool=pools.get(scenario, scenario),
        rewards=[trajectory.reward for trajectory in members if trajectory.reward is not None],
        source=members[0].source,
    )
