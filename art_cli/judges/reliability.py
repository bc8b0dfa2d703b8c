"""Reliability of a group's advantages, given the judge's known errors (RewardNoise).

Advantages are reward differences within a group, and they inherit the errors of the rewards. The best estimate of the
true advantages in squared error is E[A | observed]. Within a group this estimate is a factor times the observed
advantages, so a single number per group is enough for every algorithm that compares attempts within a group. No torch,
no files.

Flip rates. Verdicts are 0 or 1; rho0 = P(verdict 1 | truth 0), rho1 = P(verdict 0 | truth 1), J = 1 - rho0 - rho1.

    r' = (r - rho0) / J                     E[r' | truth] = truth                                              (1)
    k of n verdicts are 1, k ~ Bin(n, rho0 + J p), p ~ the success rates of the step's groups                  (2)
    reliability = E[P(truth 1 | verdict 1, p) - P(truth 1 | verdict 0, p) | k]                                 (3)
    factor = E[A(truth) | k] / A(verdicts), with A = (r - mean) / std                                          (4)

Equation 1 is the correction from Noise-corrected GRPO (Mansouri et al. 2025, arXiv:2510.18924; only abstract and
summaries were available) and Cai et al. 2025 (arXiv:2510.00915), after Natarajan et al. 2013. Rewards and differences
r'_i - mean(r') become unbiased. But the correction is affine: it cancels after division by the standard deviation, and
otherwise scales all advantages by 1 / J. Either way it changes the step size but not the direction, because the
relative weights of the groups stay the same. We therefore deviate from the paper and weight groups by (3) for
advantages that are plain differences, or by (4) for advantages divided by the group's standard deviation. Within a
group the expected direction is the same as under (1). Groups whose verdicts are probably flips get less weight: a group
with a single 1 in a step where nearly everything fails, or with a single 0 where nearly everything succeeds. The
distribution of p is estimated from the step's counts (nonparametric maximum likelihood on a grid, Kiefer and Wolfowitz
1956, with one additional group spread evenly over the grid).

Votes. Rewards are scores with the same error variance v for all attempts in a group, and s^2 is the observed variance.

    reliability = 1 - v / s^2               the intraclass correlation of mean scores, 1 - 1 / F               (5)
    factor = sqrt(reliability)              for (r - mean) / std                                               (6)

(5) is the empirical-Bayes shrinkage of a difference (James and Stein 1961; Shrout and Fleiss 1979, ICC(3,k)). True
scores have standard deviation sqrt(reliability) s; dividing (5) by this deviation gives (6).
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import Reliability, RewardNoise, ScoredTrajectory, has_signal

Floats = npt.NDArray[np.float64]

GRID = np.linspace(0.0, 1.0, 41)  # possible success rates
NUM_ROUNDS = 100  # expectation-maximization rounds


class VerdictCounts(NamedTuple):
    """A group's 0/1 verdicts and the judge's flip rates. Example: VerdictCounts(1, 8, 0.2, 0.2)"""

    num_positive: int
    num: int
    false_positive: float
    false_negative: float

    @property
    def informedness(self) -> float:
        """J = 1 - rho0 - rho1. Noise shrinks the mean difference between right and wrong attempts by this factor."""
        return 1 - self.false_positive - self.false_negative

    def rates(self) -> Floats:
        """Returns [P] the probability of a positive verdict at each grid success rate."""
        return self.false_positive + self.informedness * GRID


def with_reliability(groups: Sequence[Sequence[ScoredTrajectory]]) -> list[list[ScoredTrajectory]]:
    """Returns the step's groups with reliability attached to each trajectory.

    Groups with missing or oversized rewards get no reliability.
    """
    finished = [[each for each in group if each.error is None] for group in groups]
    return [
        [msgspec.structs.replace(each, reliability=found or msgspec.UNSET) for each in group]
        for group, found in zip(groups, reliabilities(finished), strict=True)
    ]


def reliabilities(groups: Sequence[Sequence[ScoredTrajectory]]) -> list[Reliability | None]:
    """Returns each group's reliability; None when judge errors are unknown or rewards are equal.

    `groups` must contain only finished trajectories.
    """
    verdicts = [_verdict_counts(group) for group in groups]
    prior = success_rates([counts for counts in verdicts if counts is not None])
    found: list[Reliability | None] = []
    for group, counts in zip(groups, verdicts, strict=True):
        noise = noise_of(group)
        rewards = [each.reward for each in group if each.reward is not None and abs(each.reward) <= MAX_NUMBER]
        if noise is None or len(rewards) < len(group) or not has_signal(rewards):
            found.append(None)
            continue
        if counts is not None:
            share, scaled = share_of_verdicts(counts, prior), factor_of_verdicts(counts, prior)
        else:
            share = share_of_scores(rewards, noise.variance or 0.0)
            scaled = math.sqrt(share)
        found.append(Reliability(share=share, scaled=scaled, is_left_out=share <= noise.min_reliability))
    return found


def is_left_out(group: Sequence[ScoredTrajectory]) -> bool:
    """Returns whether the group's reward differences may be pure noise. False for equal rewards or unknown noise.

    With flip rates, training decides more accurately because it compares all groups in a step.
    """
    [found] = reliabilities([[each for each in group if each.reward is not None]])
    return found is not None and found.is_left_out


def reliability_numbers(groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
    """Returns the step's reliability metrics for groups from `with_reliability`.

    reliability mean share over groups with unequal rewards and known judge errors num_unreliable number of excluded
    groups reward_corrected mean reward corrected for expected flips, if flip rates are configured
    """
    finished = [[each for each in group if each.error is None] for group in groups]
    found = [group[0].reliability for group in finished if group]
    known = [each for each in found if each is not msgspec.UNSET]
    numbers: dict[str, float] = {}
    if known:
        numbers["reliability"] = math.fsum(each.share for each in known) / len(known)
        numbers["num_unreliable"] = sum(each.is_left_out for each in known)
    if not math.isnan(corrected := corrected_mean(finished)):
        numbers["reward_corrected"] = corrected
    return numbers


def noise_of(group: Sequence[ScoredTrajectory]) -> RewardNoise | None:
    """Returns the judge's error model, shared by the whole group."""
    return group[0].noise if group else None


def corrected_mean(groups: Sequence[Sequence[ScoredTrajectory]]) -> float:
    """Returns an unbiased estimate of the mean true reward (equation 1); NaN without flip rates.

    Can fall outside [0, 1] if by chance there are more or fewer flips than expected.
    """
    counts = [each for group in groups if (each := _verdict_counts(group)) is not None]
    total = sum((each.num_positive - each.num * each.false_positive) / each.informedness for each in counts)
    return total / sum(each.num for each in counts) if counts else math.nan


def _verdict_counts(group: Sequence[ScoredTrajectory]) -> VerdictCounts | None:
    noise = noise_of(group)
    if noise is None or noise.false_positive is None or noise.false_negative is None:
        return None
    return VerdictCounts(
        sum(each.reward == 1 for each in group), len(group), noise.false_positive, noise.false_negative
    )


# --- flip rates -------------------------------------------------------------------------------------------------------


def success_rates(groups: Sequence[VerdictCounts]) -> Floats:
    """Returns [P] the prior probability of each grid success rate, estimated from a step's verdicts. Sums to 1."""
    weights = np.full(len(GRID), 1 / len(GRID))
    if not groups:
        return weights
    counted = Counter(groups)
    likelihoods = np.array([_likelihood(each) for each in counted])  # [K, P]
    times = np.array(list(counted.values()))[:, None]
    for _ in range(NUM_ROUNDS):
        posterior = likelihoods * weights
        posterior /= posterior.sum(axis=1, keepdims=True)
        weights = (1 / len(GRID) + (times * posterior).sum(axis=0)) / (1 + len(groups))
    return weights


def share_of_verdicts(counts: VerdictCounts, prior: Floats) -> float:
    """Equation 3, in [0, 1]."""
    if_positive, if_negative = _truth_given_verdict(counts)
    return float(_posterior(counts, prior) @ (if_positive - if_negative))


def factor_of_verdicts(counts: VerdictCounts, prior: Floats) -> float:
    """Equation 4. Requires unequal verdicts. Constant true rewards have advantage 0.

    If a of the k positive and b of the m negative verdicts are true, positive verdicts have mean advantage (a / k - b /
    m) m / n / std. For the verdicts themselves a = k and b = 0.
    """
    k, m = counts.num_positive, counts.num - counts.num_positive
    true_a, true_b = np.arange(k + 1.0), np.arange(m + 1.0)
    total = true_a[:, None] + true_b  # [k + 1, m + 1]
    spread = np.sqrt(total * (counts.num - total))
    difference = true_a[:, None] / k - true_b / m
    worth = np.divide(difference, spread, out=np.zeros_like(difference), where=spread > 0) * math.sqrt(k * m)
    if_positive, if_negative = _truth_given_verdict(counts)
    expected = np.einsum("pa,ab,pb->p", _binomial(k, if_positive), worth, _binomial(m, if_negative))
    return float(_posterior(counts, prior) @ expected)


def _posterior(counts: VerdictCounts, prior: Floats) -> Floats:
    """Returns [P] the posterior over success rates, given the verdicts."""
    joint = _likelihood(counts) * prior
    posterior: Floats = joint / joint.sum()
    return posterior


def _likelihood(counts: VerdictCounts) -> Floats:
    """Returns [P] the likelihood of the observed positive count at each success rate."""
    return _binomial(counts.num, counts.rates())[:, counts.num_positive]


def _truth_given_verdict(counts: VerdictCounts) -> tuple[Floats, Floats]:
    """Returns [P] P(truth 1 | verdict 1, p) and P(truth 1 | verdict 0, p). Impossible verdicts count as true."""
    says_1, right = counts.rates(), GRID * (1 - counts.false_negative)
    missed = GRID * counts.false_negative
    if_positive = np.divide(right, says_1, out=np.ones_like(GRID), where=says_1 > 0)
    if_negative = np.divide(missed, 1 - says_1, out=np.zeros_like(GRID), where=says_1 < 1)
    return if_positive, if_negative


def _binomial(num: int, rates: Floats) -> Floats:
    """Returns [P, num + 1] P(j out of num) for each rate."""
    j = np.arange(num + 1)
    rates = np.clip(rates, 0.0, 1.0)[:, None]
    return np.array(_choose(num)) * rates**j * (1 - rates) ** (num - j)


@lru_cache(maxsize=256)
def _choose(num: int) -> tuple[float, ...]:
    return tuple(float(math.comb(num, j)) for j in range(num + 1))


# --- votes ------------------------------------------------------------------------------------------------------------


def share_of_scores(scores: Sequence[float], variance: float) -> float:
    """Equation 5, clipped at 0. `variance` is the error variance per score. Equal scores give 0.

    Scores 0, 1, 2 with variance 0.25: s^2 = 1, so 0.75.
    """
    mean = math.fsum(scores) / len(scores)
    observed = math.fsum((score - mean) ** 2 for score in scores) / max(len(scores) - 1, 1)
    return max(0.0, 1 - variance / observed) if observed > 0 else 0.0


def error_variance(votes: Sequence[Sequence[float]]) -> float | None:
    """Returns the error variance of a mean over votes, from [A][V] votes; needs A and V of at least 2, otherwise None.

    A vote with uniformly higher scores changes no difference between attempts and is not an error. The error is the
    interaction residual of votes and attempts, divided by V (Shrout and Fleiss 1979, EMS / k). Votes (0, 1), (1, 2)
    give 0; votes (0, 1), (1, 0) give 0.5.
    """
    if len(votes) < 2 or len(votes[0]) < 2:
        return None
    table = np.asarray(votes, dtype=np.float64)
    residuals = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    rows, columns = table.shape
    return float((residuals**2).sum() / ((rows - 1) * (columns - 1)) / columns)
