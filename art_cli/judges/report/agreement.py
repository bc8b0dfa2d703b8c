"""The agreement of two rankings, group by group, and its interval. Pure numbers, no files.

Every measure is a ratio of two sums over groups. A group with more to compare adds a larger denominator and counts for
more. Intervals come from resampling whole groups, because pairs within one group are not independent.
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from art_cli.runs.trajectory import EQUAL_REWARDS

MAX_DRAWS = 300_000  # number of groups drawn over all resamples; they take a few tenths of a second
MIN_RESAMPLES, MAX_RESAMPLES = 200, 2000


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


def measure(ratios: Sequence[Ratio], *, seed: int = 0) -> Measure | None:
    """Returns the ratio of the sums; None when every denominator is 0. With one group the interval is the value."""
    known = [ratio for ratio in ratios if ratio.denominator > 0]
    if not known:
        return None
    size = len(known)
    tops, bottoms = [ratio.numerator for ratio in known], [ratio.denominator for ratio in known]
    draw = random.Random(seed)
    resamples = max(MIN_RESAMPLES, min(MAX_RESAMPLES, MAX_DRAWS // size))
    values = []
    for _ in range(resamples):
        indices = draw.choices(range(size), k=size)
        values.append(sum(map(tops.__getitem__, indices)) / sum(map(bottoms.__getitem__, indices)))
    values.sort()
    low, high = values[int(0.025 * resamples)], values[math.ceil(0.975 * resamples) - 1]
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
