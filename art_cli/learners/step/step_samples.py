"""Converts scored groups to samples with an algorithm's credit, and computes reward statistics. Numpy only.

PlannedStep divides a policy step's samples into optimizer steps.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from art_cli.config.schema import AlgorithmConfig, LossConfig, TrainConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.credit import rewards_of
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.algorithms.step_credit import count_shared
from art_cli.learners.samples import (
    COMPONENTS,
    Credit,
    Row,
    Sample,
    count_sampled,
    mask_of,
    observed_tokens,
    token_weights,
    trajectory_samples,
)
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import ScoredTrajectory, has_signal
from art_cli.runtime.errors import LearnerError


class StepSamples(NamedTuple):
    """A policy step's samples by group, with reward statistics."""

    groups: list[list[Sample]]  # samples by group, without empty groups
    num_with_signal: int  # groups with unequal rewards
    reward_mean: float  # over all trajectories with a reward; NaN without any
    reward_std: float
    num_groups: int
    num_trajectories: int
    num_failed: int
    finished: FinishedCounts  # counts over trajectories without an error
    # share of replies whose state was answered by another reply in the same group; NaN: not compared
    shared_states: float

    @property
    def no_signal_share(self) -> float:
        return 1 - self.num_with_signal / self.num_groups if self.num_groups else 0.0

    def reported(self) -> dict[str, Any]:
        """Returns the rewards' part of StepMetrics, by name."""
        names = ("reward_mean", "reward_std", "no_signal_share", "num_groups", "num_trajectories", "num_failed")
        return {name: getattr(self, name) for name in (*names, "shared_states")}


def make_step_samples(
    groups: Sequence[Sequence[ScoredTrajectory]], algorithm: Algorithm, *, kl: float = 0.0, echo: float = 0.0
) -> StepSamples:
    """Returns samples from all groups with signal, in an order independent of when attempts finished.

    `kl` is the reference_kl weight for every policy token, and `echo` the cross_entropy weight for every token in the
    environment's answers; weights set by the algorithm take precedence. Trajectories with an error are counted but not
    trained. Raises LearnerError if a finished trajectory has no reward.
    """
    ordered = [sorted(group, key=lambda trajectory: trajectory.index) for group in groups]
    finished = [[trajectory for trajectory in group if trajectory.error is None] for group in ordered]
    rewards = [_reward(trajectory) for group in finished for trajectory in group]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    credited = [group for group in finished if group]
    samples = [
        _group_samples(group, credits, _factor(group, is_scaled=algorithm.is_scaled), kl=kl, echo=echo)
        for group, credits in zip(credited, algorithm.credit_step(credited), strict=True)
    ]
    return StepSamples(
        groups=[group for group in samples if group],
        num_with_signal=sum(
            has_signal(rewards_of(group)) if algorithm.compares_groups else any(s.num_in(Row.POLICY) for s in trained)
            for group, trained in zip(credited, samples, strict=True)
        ),
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) if rewards else mean,
        num_groups=len(groups),
        num_trajectories=sum(map(len, groups)),
        num_failed=sum(map(len, groups)) - len(rewards),
        finished=_count_finished(finished),
        shared_states=_shared_states(finished) if algorithm.compares_states else math.nan,
    )


def split_by_update(groups: Sequence[list[Sample]], parts: int) -> list[list[Sample]]:
    """Returns the samples for each optimizer step: the groups in order, divided evenly. No optimizer step is empty."""
    parts = min(parts, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else [0]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def count(samples: Sequence[Sample], finished: FinishedCounts | None = None) -> list[UpdateCounts]:
    """Returns the counts for every loss component over an optimizer step's samples.

    `finished` is the optimizer step's part of the counts over the policy step's finished trajectories (default: count
    the samples).
    """
    counts = []
    for component in COMPONENTS:
        inside = [sample for sample in samples if sample.num_in(component)]
        tokens, trajectories = sum(sample.num_in(component) for sample in inside), {s.trajectory_id for s in inside}
        trained = FinishedCounts(tokens, len(inside), len(trajectories))
        is_of_policy = component in (Row.POLICY, Row.REFERENCE_KL)
        counts.append(UpdateCounts(*trained, all=finished if finished is not None and is_of_policy else trained))
    return counts


def _count_finished(groups: Sequence[Sequence[ScoredTrajectory]]) -> FinishedCounts:
    counts = [count_sampled(trajectory) for group in groups for trajectory in group]
    tokens, samples = (sum(values) for values in zip((0, 0), *counts, strict=True))
    return FinishedCounts(tokens, samples, sum(tokens > 0 for tokens, _ in counts))


def _reward(trajectory: ScoredTrajectory) -> float:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise LearnerError(f"trajectory {trajectory.id}: its reward is {trajectory.reward}; judge it first")
    if abs(trajectory.reward) > MAX_NUMBER:
        raise LearnerError(f"trajectory {trajectory.id}: scale its reward {trajectory.reward:g} below {MAX_NUMBER:g}")
    return trajectory.reward


def _shared_states(groups: Sequence[Sequence[ScoredTrajectory]]) -> float:
    counts = [count_shared(group) for group in groups]
    num_replies = sum(total for total, _ in counts)
    return sum(shared for _, shared in counts) / num_replies if num_replies else math.nan


def _factor(group: Sequence[ScoredTrajectory], *, is_scaled: bool) -> float:
    """Returns the advantage factor that accounts for judge errors; 1 if the errors are unknown."""
    first = group[0]
    if first.reliability is not msgspec.UNSET:
        return first.reliability.factor(is_scaled=is_scaled)
    has_errors = first.noise is not None and has_signal(rewards_of(group))
    assert not has_errors, f"{first.group_id}: its judge has known errors; call judges.reliability.with_reliability"
    return 1.0


def _group_samples(
    group: Sequence[ScoredTrajectory],
    credits: Sequence[Credit | float | None],
    factor: float,
    *,
    kl: float,
    echo: float,
) -> list[Sample]:
    """Returns the group's samples. A component whose weights are all zero within the group is dropped (contract 4).

    `factor` multiplies the advantages to account for judge errors. `echo` applies to every group, because the
    environment's answers are worth learning at any rewards.
    """
    chosen = [
        (trajectory, token_weights(trajectory, credit))
        for trajectory, credit in zip(group, credits, strict=True)
        if credit is not None
    ]
    for _, weights in chosen:
        weights[Row.POLICY] *= factor
    # not the value component, because the critic also learns targets of 0
    for component in (Row.POLICY, Row.CROSS_ENTROPY, Row.REFERENCE_KL):
        if not any(np.nan_to_num(weights[component]).any() for _, weights in chosen):
            for _, weights in chosen:
                weights[component] = np.nan
    if echo > 0:
        for trajectory, weights in chosen:
            is_free = ~mask_of(weights, Row.CROSS_ENTROPY)
            weights[Row.CROSS_ENTROPY, is_free & observed_tokens(trajectory)] = echo
    if kl > 0:
        for _, weights in chosen:
            is_free = ~mask_of(weights, Row.REFERENCE_KL)
            weights[Row.REFERENCE_KL, is_free & mask_of(weights, Row.POLICY)] = kl
    return [sample for trajectory, weights in chosen for sample in trajectory_samples(trajectory, weights)]


class PlannedStep(NamedTuple):
    """A policy step's samples, divided into optimizer steps."""

    batch: StepSamples
    parts: list[list[Sample]]  # samples for each optimizer step
    finished: FinishedCounts  # one optimizer step's part of the counts over the policy step's finished trajectories


def plan_step(
    groups: Sequence[Sequence[ScoredTrajectory]],
    algorithm: Algorithm,
    *,
    loss: LossConfig | AlgorithmConfig,
    train: TrainConfig,
) -> PlannedStep:
    """Plans a policy step on these groups."""
    batch = make_step_samples(groups, algorithm, kl=loss.kl, echo=loss.echo)
    parts = split_by_update(batch.groups, train.updates_per_step)
    # a step with few signal groups takes fewer updates, each as large as if all groups had signal
    return PlannedStep(batch, parts, batch.finished.divided(max(1, min(train.updates_per_step, batch.num_groups))))
