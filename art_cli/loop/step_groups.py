"""StepGroups: which groups a step plays, in waves. Groups that teach nothing are refilled (DAPO, section 3.2).

    wave 1 = the step's own groups; wave 2 = as many further groups as wave 1 has groups without signal; and so on

Each wave is as large as what is missing to `rollout.groups_per_step` groups with signal. So the groups of a step are
the shortest beginning of its scenarios that has enough of them with signal, or all that `rollout.refill` allows. This
follows from the step's files alone: a run that was killed in the middle of a wave goes on to the same groups.
"""

import math
import re
from collections.abc import Mapping, Sequence

from art_cli.config.sections.rollout_config import RolloutConfig
from art_cli.loop.evaluate import values_by_scenario
from art_cli.loop.owed_groups import plan_groups
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.reliability import is_left_out
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, has_signal

MAX_POOLS = 16  # number of commonest pools whose mean reward is a metric of the step

Scored = Mapping[str, Sequence[ScoredTrajectory]]  # group id -> the group, for every group that has been scored


class StepGroups:
    """The groups of one step: those that were begun so far, and which ones come next.

    `scenarios` are those of the step's own groups, then those to refill with. `done` are its finished trajectories.
    `num_replayed` groups of earlier steps take the places of as many own ones.
    """

    def __init__(
        self,
        config: RolloutConfig,
        step: int,
        scenarios: Sequence[Json],
        done: Sequence[Trajectory],
        *,
        num_replayed: int = 0,
    ) -> None:
        self.done = list(done)
        self._config, self._wanted = config, config.groups_per_step - num_replayed
        plans = plan_groups(scenarios[: self._wanted + config.num_spare], step=step, group_size=config.group_size)
        self._plans: dict[str, list[RolloutPlan]] = {}  # group id -> its rollouts, in order
        for plan in plans:
            self._plans.setdefault(plan.group_id, []).append(plan)
        self._names = list(self._plans)
        self._num = 0  # number of groups begun
        begun = {trajectory.group_id for trajectory in done}
        self._num_begun_before = max((n for n, name in enumerate(self._names, 1) if name in begun), default=0)

    def next(self, scored: Scored) -> list[RolloutPlan]:
        """Returns the rollouts of the next wave, or [] if the step has its groups.

        A group that could not be scored counts as one without signal. Groups that an earlier start began belong to the
        first wave, so that no finished trajectory is lost if a judge changes its verdict the second time.
        """
        missing = self._wanted - sum(name in scored and _tells(scored[name]) for name in self._names[: self._num])
        first, self._num = self._num, min(len(self._names), max(self._num + missing, self._num_begun_before))
        return [plan for name in self._names[first : self._num] for plan in self._plans[name]]

    def scored(self, scored: Scored) -> list[list[ScoredTrajectory]]:
        """Returns the groups to train on, in the order of the plan; those that could not be scored are left out."""
        return [list(scored[name]) for name in self._names[: self._num] if name in scored]

    def numbers(self, scored: Scored) -> dict[str, float]:
        """Returns the rollouts' metrics: means over the step's first groups, without the refills.

        Refilling goes on until enough groups have signal, so a mean over all groups would prefer such scenarios.
        """
        own = set(self._names[: self._wanted])
        numbers = {
            f"metrics.{name}": sum(values.values()) / len(values)
            for name, values in values_by_scenario([t for t in self.done if t.group_id in own]).items()
            if name not in ("reward", "failed")
        }
        groups = [scored[name] for name in self._names[: self._wanted] if name in scored]
        if self._config.pool is not None:
            numbers |= _pool_numbers(groups, self._config.pool)
        if self._config.num_spare:
            numbers["num_refilled"] = self._num - self._wanted
        if self._config.num_spare or self._config.replay is not None:
            numbers |= _reward_numbers(groups)
        return numbers


def _rewards(group: Sequence[ScoredTrajectory]) -> list[float]:
    return [trajectory.reward for trajectory in group if trajectory.reward is not None]


def _tells(group: Sequence[ScoredTrajectory]) -> bool:
    return has_signal(_rewards(group)) and not is_left_out(group)


def _pool_numbers(groups: Sequence[Sequence[ScoredTrajectory]], key: str) -> dict[str, float]:
    """Returns the mean reward of each pool, or of the commonest ones if there are many."""
    rewards: dict[str, list[float]] = {}
    for members in groups:
        rewards.setdefault(str(members[0].scenario.get(key)), []).extend(_rewards(members))
    common = sorted((pool for pool in rewards if rewards[pool]), key=lambda pool: -len(rewards[pool]))[:MAX_POOLS]
    names = {pool: re.sub(r"\W", "_", pool)[:40] for pool in common}
    return {f"pool.{names[pool]}": math.fsum(rewards[pool]) / len(rewards[pool]) for pool in common}


def _reward_numbers(groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
    """Returns mean and deviation of the rewards and the share of groups without signal; {} if there are no rewards."""
    rewards = [reward for group in groups for reward in _rewards(group)]
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "no_signal_share": 1 - sum(map(_tells, groups)) / len(groups),
    }
