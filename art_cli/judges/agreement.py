"""The agreement of two rankings, group by group, with its interval, and a judge's errors. Pure numbers, no files.

Every measure is a ratio of two sums over groups. A group with more to compare adds a larger denominator and counts for
more. Intervals come from resampling whole groups, because pairs within one group are not independent.

A judge's errors have the form that `judge.noise` takes. Flip rates compare a judge that gives 0 or 1 with a gold of 0
and 1. Reliability compares a judge that votes several times with itself. `art_cli/judges/reliability.py` has what
training makes of either.
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from art_cli.judges.reliability import error_variance
from art_cli.runs.trajectory import EQUAL_REWARDS

MAX_DRAWS = 300_000  # number of groups drawn over all resamples; they take a few tenths of a second
MIN_RESAMPLES, MAX_RESAMPLES = 200, 2000
MIN_GROUPS = 6  # of fewer, all lean to one side by chance in more than 5 % of cases: 2 / 2**5 is 6 %


class Ratio(NamedTuple):
    """One group's part of both sums of a measure. Example: Ratio(5, 6): 5 of 6 pairs are ordered alike."""

    numerator: float
    denominator: float


class Measure(msgspec.Struct, frozen=True):
    """A measure with its 95 % bootstrap interval (Efron 1979), over the `num` groups with a denominator above 0."""

    value: float
    low: float
    high: float
    num: int

    @property
    def stands_out(self) -> bool:
        """Whether it differs from 0 by more than chance explains."""
        return self.num >= MIN_GROUPS and self.low * self.high > 0


def measure(ratios: Sequence[Ratio], *, seed: int = 0) -> Measure | None:
    """Returns the ratio of the sums; None when every denominator is 0. With one group the interval is the value."""
    known = [ratio for ratio in ratios if ratio.denominator > 0 or ratio.numerator]
    if not any(ratio.denominator for ratio in known):
        return None
    size = len(known)
    tops, bottoms = [ratio.numerator for ratio in known], [ratio.denominator for ratio in known]
    draw = random.Random(seed)
    resamples = max(MIN_RESAMPLES, min(MAX_RESAMPLES, MAX_DRAWS // size))
    values = []
    for _ in range(resamples):
        indices = draw.choices(range(size), k=size)
        if bottom := sum(map(bottoms.__getitem__, indices)):
            values.append(sum(map(tops.__getitem__, indices)) / bottom)
    values.sort()
    low, high = values[int(0.025 * len(values))], values[math.ceil(0.975 * len(values)) - 1]
    return Measure(sum(tops) / sum(bottoms), low, high, size)


def pairwise(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns (pairs that `scores` orders as the gold does, pairs whose gold differs). A tie counts one half."""
    right, total = 0.0, 0
    for (score, true), (other_score, other_true) in combinations(zip(scores, gold, strict=True), 2):
        if abs(true - other_true) > EQUAL_REWARDS:
            total += 1
            difference = (score - other_score) * math.copysign(1.0, true - other_true)
            right += 0.5 if abs(difference) <= EQUAL_REWARDS else float(difference > 0)
    return Ratio(right, total)


def pair_flips(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns (pairs that `scores` orders against the gold, pairs whose gold differs). A tie in `scores` is no flip."""
    wrong, total = 0, 0
    for (score, true), (other_score, other_true) in combinations(zip(scores, gold, strict=True), 2):
        by_score, by_gold = _sign(score - other_score), _sign(true - other_true)
        wrong += by_score * by_gold < 0
        total += by_gold != 0
    return Ratio(wrong, total)


def kendall_tau(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Kendall's tau-b (1945) as (tau, 1); (0, 0) when either side is all ties, because tau has no value then.

    tau_b = (C - D) / sqrt((n0 - ties in scores) (n0 - ties in gold)), n0 = n (n - 1) / 2.
    """
    balance, untied_scores, untied_gold = 0, 0, 0
    for (score, true), (other_score, other_true) in combinations(zip(scores, gold, strict=True), 2):
        by_score, by_gold = _sign(score - other_score), _sign(true - other_true)
        balance += by_score * by_gold
        untied_scores += by_score != 0
        untied_gold += by_gold != 0
    if not untied_scores or not untied_gold:
        return Ratio(0.0, 0.0)
    return Ratio(balance / math.sqrt(untied_scores * untied_gold), 1.0)


def best_of_group(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns (chance that the highest score is one of the truly best, 1); (0, 0) when the gold is all equal.

    Of several attempts with the highest score, each is taken with the same chance.
    """
    if not gold or max(gold) - min(gold) <= EQUAL_REWARDS:
        return Ratio(0.0, 0.0)
    top = [true for score, true in zip(scores, gold, strict=True) if score >= max(scores) - EQUAL_REWARDS]
    return Ratio(sum(true >= max(gold) - EQUAL_REWARDS for true in top) / len(top), 1.0)


def slope(xs: Sequence[float], ys: Sequence[float]) -> Ratio:
    """Returns a group's part of a least-squares slope of y on x, about its means: (sum dx dy, sum dx dx)."""
    if not xs:
        return Ratio(0.0, 0.0)
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    return Ratio(
        math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)),
        math.fsum((x - mean_x) ** 2 for x in xs),
    )


def _sign(difference: float) -> int:
    return 0 if abs(difference) <= EQUAL_REWARDS else 1 if difference > 0 else -1


class FlipRates(msgspec.Struct, frozen=True):
    """The rates at which the reward differs from the gold. Example: 30 of 200 wrong attempts got a 1: false_positive
    0.15."""

    false_positive: Measure  # share of the attempts with gold 0 that got a 1
    false_negative: Measure  # share of the attempts with gold 1 that got a 0
    num_wrong: int  # attempts with gold 0
    num_right: int  # attempts with gold 1

    @property
    def is_usable(self) -> bool:
        """Returns whether the verdicts depend on the truth at all, by the three digits that are shown.

        `judge.noise` refuses rates that do not.
        """
        return round(self.false_positive.value, 3) + round(self.false_negative.value, 3) < 1


def flip_rates(rewards: Sequence[Sequence[float]], golds: Sequence[Sequence[float]]) -> FlipRates | None:
    """Returns the flip rates of the rewards, or None if a value is not 0 or 1, or the gold is all 0 or all 1."""
    if any(value not in (0, 1) for groups in (rewards, golds) for values in groups for value in values):
        return None
    counts = []
    for truth in (0, 1):
        found = []
        for given, gold in zip(rewards, golds, strict=True):
            said = [reward for reward, true in zip(given, gold, strict=True) if true == truth]
            found.append(Ratio(sum(reward != truth for reward in said), len(said)))
        counts.append(found)
    wrong, right = (_rate(found) for found in counts)
    if wrong is None or right is None:
        return None
    return FlipRates(wrong, right, *(round(sum(ratio.denominator for ratio in found)) for found in counts))


def _rate(ratios: Sequence[Ratio]) -> Measure | None:
    """Returns the rate with its interval. One of 0 or 1, which every resample repeats, has an exact bound instead.

    That is Clopper and Pearson's (1934) for none of as many trials as there are groups, because attempts of one group
    may err together: 1 - 0.025 ** (1 / num).
    """
    found = measure(ratios)
    if found is None or 0 < found.value < 1:
        return found
    bound = 1 - 0.025 ** (1 / found.num)
    return Measure(found.value, 0.0, bound, found.num) if found.value == 0 else Measure(1.0, 1 - bound, 1.0, found.num)


class VoteReliability(msgspec.Struct, frozen=True):
    """The share of the differences between attempts of a group that repeats from vote to vote; at most 1.

    The intraclass correlations ICC(3,k) and ICC(3,1) of Shrout and Fleiss (1979), pooled over groups. Below 0: votes
    differ more than attempts do.
    """

    all_votes: Measure  # reliability of the mean of an attempt's votes
    one_vote: Measure  # reliability of a single vote


def vote_reliability(groups: Sequence[Sequence[Sequence[float]]]) -> VoteReliability | None:
    """Returns it from [A][k] votes of each group, or None if no group has two attempts and two votes that differ.

    With s^2 the variance of the attempts' means and v their error variance: sum(s^2 - v) / sum(s^2) over groups, and
    sum(s^2 - v) / sum(s^2 + (k - 1) v), because a single vote has the error variance k v.
    """
    whole, single = [], []
    for votes in groups:
        num_votes = len(votes[0]) if votes else 0
        if any(len(each) != num_votes for each in votes) or (error := error_variance(votes)) is None:
            continue
        means = [sum(each) / num_votes for each in votes]
        centre = sum(means) / len(means)
        observed = sum((mean - centre) ** 2 for mean in means) / (len(means) - 1)
        whole.append(Ratio(observed - error, observed))
        single.append(Ratio(observed - error, observed + (num_votes - 1) * error))
    all_votes, one_vote = measure(whole), measure(single)
    return None if all_votes is None or one_vote is None else VoteReliability(all_votes, one_vote)
