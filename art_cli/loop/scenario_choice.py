"""ScenarioChoice: the scenarios that each step plays and replays, by the seed, the step and earlier steps' files."""

from collections.abc import Sequence

from art_cli.config.schema import RunConfig
from art_cli.loop.owed_groups import group
from art_cli.rollouts.adaptive import AdaptiveOrder, choose_replays
from art_cli.rollouts.scenario_files import ScenarioOrder, pools_of
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import GroupRewards, Json, ScoredTrajectory
from art_cli.runtime.errors import RunError


class ScenarioChoice:
    """Chooses among the scenarios of a run. The files of a past step are read once."""

    def __init__(self, config: RunConfig, run: RunDir, scenarios: Sequence[Json]) -> None:
        """Raises DataError: a scenario without the key that `rollout.pool` names."""
        self._config, self._run, self._scenarios = config, run, scenarios
        self._pools = pools_of(scenarios, config.rollout.pool)
        ids, seed = [str(scenario["id"]) for scenario in scenarios], config.train.seed
        self._epochs = ScenarioOrder(ids, seed=seed, shuffle=config.rollout.shuffle)
        self._adaptive = AdaptiveOrder(ids, seed=seed, pools=self._pools)
        self._history: dict[int, list[GroupRewards]] = {}

    def scenarios(self, step: int) -> list[Json]:
        """Returns the scenarios of the step's groups, then those that it may refill with."""
        rollout = self._config.rollout
        num_own, num_more = rollout.groups_per_step - rollout.num_replays, rollout.num_spare + rollout.num_replays
        if rollout.choose == "epochs":
            chosen = self._epochs.groups(step, num_own, num_more)
        else:
            chosen = self._adaptive.groups(step, num_own, num_more, self.history(step))
        return [self._scenarios[index] for index in chosen]

    def replays(self, step: int) -> list[list[ScoredTrajectory]]:
        """Returns the groups of earlier steps to train on again. Raises RunError: the file of one lacks it."""
        replay = self._config.rollout.replay
        if replay is None:
            return []
        chosen = choose_replays(
            self.history(step),
            step=step,
            num=self._config.rollout.num_replays,
            max_age=replay.max_age,
            seed=self._config.train.seed,
        )
        groups_of = {past: group(self._run.scored(past)) for past in {past for past, _ in chosen}}
        for past, group_id in chosen:
            if group_id not in groups_of[past]:
                raise RunError(
                    f"{self._run.scored_path(past)}: no complete group {group_id}, which step {step} replays"
                )
        return [groups_of[past][group_id] for past, group_id in chosen]

    def history(self, step: int) -> dict[int, list[GroupRewards]]:
        """Returns the groups of the earlier steps that are certainly done when `step` begins.

        With `train.max_staleness` a step may begin before the steps right before it are done. Those are left out in
        every run, so that a resumed one chooses the same.
        """
        num = max(0, step - self._config.train.max_staleness)
        for past in range(num):
            if past not in self._history:
                self._history[past] = self._run.group_rewards(past)
        return {past: self._history[past] for past in range(num)}

    def note(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Writes down the rewards of a finished step's groups, for the choices of later steps."""
        if self._config.rollout.choose == "epochs" and self._config.rollout.replay is None:
            return
        pools = dict(zip((str(scenario["id"]) for scenario in self._scenarios), self._pools, strict=True))
        self._run.write_group_rewards(step, [_rewards_of(members, pools) for members in groups])


def _rewards_of(members: Sequence[ScoredTrajectory], pools: dict[str, str]) -> GroupRewards:
    scenario = str(members[0].scenario.get("id"))
    return GroupRewards(
        group_id=members[0].group_id,
        scenario=scenario,
        pool=pools.get(scenario, scenario),
        rewards=[trajectory.reward for trajectory in members if trajectory.reward is not None],
    )
