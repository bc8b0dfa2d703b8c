"""Credit: a trajectory's advantage relative to its group. Numbers in, numbers out."""

import math
from collections.abc import Sequence
from statistics import variance

from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Turn, has_signal


def advantages(rewards: Sequence[float], *, scale: bool) -> list[float]:
    """Returns [G] reward minus the group's mean, divided by the group's standard deviation if `scale` is set.

    GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r). The deviation is the
    sample's (division by G - 1), as in TRL and verl; without `scale` it is Dr. GRPO's A_i = r_i - mean(r)
    (arXiv:2503.20783). Nothing is added to the deviation, so scaled advantages do not depend on the rewards' unit.

    An empty group gives []; a group of one, or rewards equal within 1e-8, give exact zeros.
    """
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / deviation for value in centred]


def over_mean(rewards: Sequence[float]) -> list[float]:
    """Returns [G] (r_i - mean(r)) / mean(r), for non-negative rewards. MaxRL, Tajwar et al. 2026 (arXiv:2602.02710).

    Rewards 0, 0, 3: mean 1, so -1, -1, 2. Rewards equal within 1e-8, including all zeros, give zeros.
    """
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return [value / mean for value in advantages(rewards, scale=False)] if mean else [0.0] * len(rewards)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Returns [G] reward minus the mean of the others' rewards. RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), 3.3.

    It equals G / (G - 1) times the difference from the group's mean. Rewards 0, 0, 3: -1.5, -1.5, 3. A group of one, or
    rewards equal within 1e-8, give zeros.
    """
    others = len(rewards) - 1
    return [value * len(rewards) / others if others else 0.0 for value in advantages(rewards, scale=False)]


def over_shrunk_mean(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns [P][G] reward minus a mean between the group's other rewards (weight w) and the other groups' (1 - w).

    Zeng et al. 2025, Shrinkage Baselines (arXiv:2511.03710): the mean of a few rewards is noisy, and James and Stein's
    estimator draws it toward the mean of all. w = t / (t + s / (G - 1)), where s is the variance within groups and t
    the variance of the groups' true means, both estimated from the step; the paper also leaves the group out of w.
    A single group has w = 1. Rewards 0, 1 and 0, 1: s = 0.5, t = 0, so w = 0 and each advantage is reward - 0.5.

    Ours: a group of equal rewards has w = 0, because it says nothing within itself. If all its attempts earn less than
    the others, they count as failures. So a policy leaves a path that earns a part of the reward.
    """
    flat = [reward for group in rewards for reward in group]
    if not has_signal(flat):
        return [[0.0] * len(group) for group in rewards]
    sums, total, num = [math.fsum(group) for group in rewards], math.fsum(flat), len(flat)
    means = [of_group / len(group) for of_group, group in zip(sums, rewards, strict=True)]
    errors = math.fsum((reward - mean) ** 2 for mean, group in zip(means, rewards, strict=True) for reward in group)
    within = errors / max(num - len(rewards), 1)
    noise = within * math.fsum(1 / len(group) for group in rewards) / len(rewards)
    between = max(variance(means) - noise, 0.0) if len(rewards) > 1 else math.inf
    centred = []
    for group, of_group in zip(rewards, sums, strict=True):
        others, rest = len(group) - 1, (total - of_group) / max(num - len(group), 1)
        weight = 0.0
        if has_signal(group):
            weight = 1.0 if between == math.inf else between / (between + within / others)
        own = [(of_group - reward) / max(others, 1) for reward in group]
        values = [r - weight * mean - (1 - weight) * rest for r, mean in zip(group, own, strict=True)]
        centred.append([0.0 if abs(value) <= EQUAL_REWARDS else value for value in values])
    return centred


def scale_over_step(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns [P][G] (value - mean) / std over all values in a step's P groups. Values within 1e-8 of the mean give 0.

    REINFORCE++, Hu et al. 2025 (arXiv:2501.03262). The deviation is the sample's (division by their number - 1).
    """
    flat = [value for group in values for value in group]
    mean = math.fsum(flat) / max(len(flat), 1)
    scaled = [
        0.0 if abs(value - mean) <= EQUAL_REWARDS else worth
        for value, worth in zip(flat, advantages(flat, scale=True), strict=True)
    ]
    rest = iter(scaled)
    return [[next(rest) for _ in group] for group in values]


def weighted_sum(parts: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Returns [G] the sum over parts of weight * value, for [K][G] parts and [K] weights."""
    return [
        math.fsum(w * value for w, value in zip(weights, values, strict=True)) for values in zip(*parts, strict=True)
    ]


def rewards_of(group: Sequence[ScoredTrajectory]) -> list[float]:
    """Returns [G] the rewards; every trajectory must have one."""
    return [trajectory.reward for trajectory in group if trajectory.reward is not None]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """Returns the reward penalty for a reply's length: 0 up to max - buffer, then linear down to -1 at max.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13. At max 100, buffer 20: 80 tokens 0, 90 tokens -0.5, 100 tokens
    and above -1.
    """
    free = max_tokens - min(buffer, max_tokens)
    return max(-1.0, min(0.0, (free - num_tokens) / (max_tokens - free)))


def seen_turns(trajectory: ScoredTrajectory) -> list[Turn]:
    """Returns the turns whose replies the rollout received."""
    return [turn for turn in trajectory.turns if not turn.is_abandoned]
