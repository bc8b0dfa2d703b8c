"""Scored groups made into samples, as an algorithm credits them, with the statistics of their rewards."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.algorithms.step_credit import count_shared
from art_cli.learners.samples import Sample, count_sampled, trajectory_samples
from art_cli.learners.token_weights import (
    CROSS_ENTROPY,
    NUM_COMPONENTS,
    POLICY,
    REFERENCE_KL,
    VALUE,
    Credit,
    observed_tokens,
    token_weights,
)
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.reliability import corrected_mean, reliabilities
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError


class StepSamples(NamedTuple):
    """The samples of a policy step, group by group, and the statistics of the rewards."""

    groups: list[list[Sample]]  # the samples of each group that has some
    num_with_signal: int  # groups with unequal rewards
    reward_mean: float  # over all trajectories that have a reward; NaN where none has
    reward_std: float
    num_groups: int
    num_trajectories: int
    num_failed: int
    finished: FinishedCounts  # counts over the trajectories without an error
    shared_states: float  # share of replies whose state another reply of the group answered; NaN: not compared
    reliability: float  # mean over the groups whose rewards differ and whose judge knows its errors; NaN: none
    num_unreliable: float  # groups left out of these; NaN: no judge knows its errors
    reward_corrected: float  # mean of the rewards without the flips that are expected; NaN: no flip rates are known

    @property
    def no_signal_share(self) -> float:
        return 1 - self.num_with_signal / self.num_groups if self.num_groups else 0.0

    def reported(self) -> dict[str, Any]:
        """Returns the rewards' part of StepMetrics, by name."""
        names = ("reward_mean", "reward_std", "no_signal_share", "num_groups", "num_trajectories", "num_failed")
        judged = ("shared_states", "reliability", "num_unreliable", "reward_corrected")
        return {name: getattr(self, name) for name in (*names, *judged)}


def make_step_samples(
    groups: Sequence[Sequence[ScoredTrajectory]], algorithm: Algorithm, *, kl: float = 0.0, echo: float = 0.0
) -> StepSamples:
    """Returns the samples of all groups with signal, in an order that does not depend on the order of finishing.

    `kl` is the weight in reference_kl of every token in the policy component, and `echo` that in cross_entropy of every
    token of the environment's answers, where the algorithm gives none. A trajectory with an error is counted and left
    out. Raises LearnerError for a finished trajectory without a reward.
    """
    ordered = [sorted(group, key=lambda trajectory: trajectory.index) for group in groups]
    finished = [[trajectory for trajectory in group if trajectory.error is None] for group in ordered]
    rewards = [_reward(trajectory) for group in finished for trajectory in group]
    mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
    credited = [group for group in finished if group]
    believed = reliabilities(credited, is_scaled=algorithm.is_scaled)
    samples = [
        _group_samples(group, credits, 1.0 if found is None else found.factor, kl=kl, echo=echo)
        for group, credits, found in zip(credited, algorithm.credit_step(credited), believed, strict=True)
    ]
    known = [found for found in believed if found is not None]
    return StepSamples(
        groups=[group for group in samples if group],
        num_with_signal=sum(any(sample.num_in(POLICY) for sample in group) for group in samples),
        reward_mean=mean,
        reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) if rewards else mean,
        num_groups=len(groups),
        num_trajectories=sum(map(len, groups)),
        num_failed=sum(map(len, groups)) - len(rewards),
        finished=_count_finished([trajectory for group in finished for trajectory in group]),
        shared_states=_shared_states(finished) if algorithm.compares_states else math.nan,
        reliability=math.fsum(found.share for found in known) / len(known) if known else math.nan,
        num_unreliable=sum(found.is_left_out for found in known) if known else math.nan,
        reward_corrected=corrected_mean(credited),
    )


def split_by_update(groups: Sequence[list[Sample]], parts: int) -> list[list[Sample]]:
    """Returns the samples of each optimizer step: the groups in order, divided evenly. No step is empty."""
    parts = min(parts, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else [0]
    return [
        [sample for group in groups[start:end] for sample in group]
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def count(samples: Sequence[Sample], finished: FinishedCounts | None = None) -> list[UpdateCounts]:
    """Returns the counts of each component of the loss over the samples of an optimizer step.

    `finished` is its part of what the step's finished trajectories hold. If None, the samples are all.
    """
    counts = []
    for component in range(NUM_COMPONENTS):
        inside = [sample for sample in samples if sample.num_in(component)]
        tokens, trajectories = sum(sample.num_in(component) for sample in inside), {s.trajectory_id for s in inside}
        trained = FinishedCounts(tokens, len(inside), len(trajectories))
        is_of_policy = component in (POLICY, REFERENCE_KL)
        counts.append(UpdateCounts(*trained, all=finished if finished is not None and is_of_policy else trained))
    return counts


def _count_finished(trajectories: Sequence[ScoredTrajectory]) -> FinishedCounts:
    counts = [count_sampled(trajectory) for trajectory in trajectories]
    tokens, samples = (sum(values) for values in zip((0, 0), *counts, strict=True))
    return FinishedCounts(tokens, samples, sum(tokens > 0 for tokens, _ in counts))


def _reward(trajectory: ScoredTrajectory) -> float:
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise LearnerError(f"trajectory {trajectory.id}: its reward is {trajectory.reward}; judge it first")
    if abs(trajectory.reward) > MAX_NUMBER:
        raise LearnerError(
            f"trajectory {trajectory.id}: its reward is {trajectory.reward:g}; scale it below {MAX_NUMBER:g}"
        )
    return trajectory.reward


def _shared_states(groups: Sequence[Sequence[ScoredTrajectory]]) -> float:
    counts = [count_shared(group) for group in groups]
    num_replies = sum(total for total, _ in counts)
    return sum(shared for _, shared in counts) / num_replies if num_replies else math.nan


def _group_samples(
    group: Sequence[ScoredTrajectory],
    credits: Sequence[Credit | float | None],
    factor: float,
    *,
    kl: float,
    echo: float,
) -> list[Sample]:
    """Returns the group's samples. A component whose weights are all zero in the group is left out (contract 4).

    `factor` is what the group's advantages are multiplied by, because of its judge's errors.
    `echo` is for all groups, because the environment's answers are worth learning whatever the rewards are.
    """
    chosen = [
        (trajectory, token_weights(trajectory, credit))
        for trajectory, credit in zip(group, credits, strict=True)
        if credit is not None
    ]
    for _, weights in chosen:
        weights[POLICY] *= factor
    for component in range(VALUE):  # a target of 0 is one for the critic to learn
        if not any(np.nan_to_num(weights[component]).any() for _, weights in chosen):
            for _, weights in chosen:
                weights[component] = np.nan
    for trajectory, weights in chosen if echo > 0 else []:
        weights[CROSS_ENTROPY, np.isnan(weights[CROSS_ENTROPY]) & observed_tokens(trajectory)] = echo
    for _, weights in chosen if kl > 0 else []:
        weights[REFERENCE_KL, np.isnan(weights[REFERENCE_KL]) & ~np.isnan(weights[POLICY])] = kl
    return [sample for trajectory, weights in chosen for sample in trajectory_samples(trajectory, weights)]
