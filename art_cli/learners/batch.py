"""A batch: scored groups made into samples, with what has to be said about the rewards."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from art_cli.errors import LearnerError
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.shares import UpdateCounts
from art_cli.learners.samples import Sample, trajectory_samples
from art_cli.outcome import MAX_NUMBER
from art_cli.trajectory import ScoredTrajectory


class Batch(NamedTuple):
    """What a step trains on, group by group, and the rewards it comes from."""

    groups: list[list[Sample]]  # of each group with signal
    reward_mean: float  # over all trajectories that have a reward; NaN where none has
    reward_std: float
    num_groups: int
    num_trajectories: int
    num_failed: int

    @property
    def no_signal_share(self) -> float:
        return 1 - len(self.groups) / self.num_groups if self.num_groups else 0.0


def make_batch(groups: Sequence[Sequence[ScoredTrajectory]], algorithm: Algorithm) -> Batch:
    """The samples of all groups with signal, in an order that does not depend on which trajectory finished first.

    A trajectory with an error is counted and left out. Raises LearnerError: a finished trajectory without a reward.
    """
    ordered = [sorted(group, key=lambda trajectory: trajectory.index) for group in groups]
    finished = [[trajectory for trajectory in group if trajectory.error is None] for group in ordered]
    rewards = [_reward(trajectory) for group in finished for trajectory in group]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    samples = [_group_samples(group, algorithm) for group in finished]
    return Batch(
        groups=[group for group in samples if group],
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) if rewards else mean,
        num_groups=len(groups),
        num_trajectories=sum(map(len, groups)),
        num_failed=sum(map(len, groups)) - len(rewards),
    )


def split_batch(groups: Sequence[list[Sample]], parts: int) -> list[list[Sample]]:
    """The samples of each optimizer step: the groups in order, dealt out as evenly as they go; none is empty."""
    parts = min(parts, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else [0]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def count(samples: Sequence[Sample]) -> UpdateCounts:
    return UpdateCounts(
        tokens=sum(len(sample.targets) for sample in samples),
        samples=len(samples),
        trajectories=len({sample.trajectory_id for sample in samples}),
    )


def _reward(trajectory: ScoredTrajectory) -> float:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise LearnerError(f"trajectory {trajectory.id}: its reward is {trajectory.reward}; judge it first")
    if abs(trajectory.reward) > MAX_NUMBER:
        raise LearnerError(
            f"trajectory {trajectory.id}: its reward is {trajectory.reward:g}; scale it below {MAX_NUMBER:g}"
        )
    return trajectory.reward


def _group_samples(group: Sequence[ScoredTrajectory], algorithm: Algorithm) -> list[Sample]:
    """The group's samples; none where no trajectory is worth more than another (contract 4)."""
    credits = algorithm.credit(group)
    if not any(credits):
        return []
    return [
        sample
        for trajectory, advantage in zip(group, credits, strict=True)
        if advantage is not None
        for sample in trajectory_samples(trajectory, advantage)
    ]
