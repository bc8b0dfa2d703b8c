"""Agreement of two rankings with a confidence interval, and error rates of a judge. Pure functions on numbers.

Every measure is a ratio of two sums over groups, so groups with more comparisons weigh more. Intervals come from
resampling whole groups, because pairs within a group are not independent.

Error rates have the form of `judge.noise`. Flip rates compare 0/1 rewards with 0/1 gold labels. Reliability compares
the repeated votes of a judge. `art_cli/judges/reliability.py` uses both in training.
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from art_cli.judges.reliability import error_variance
from art_cli.runs.trajectory import EQUAL_REWARDS

MAX_DRAWS = 300_000  # groups drawn over all resamples (a few tenths of a second)
MIN_RESAMPLES, MAX_RESAMPLES = 200, 2000
MIN_GROUPS = 6  # with 5 groups, all lean to one side by chance with probability 2 / 2**5 = 6 %


class Ratio(NamedTuple):
    """One group's contribution to both sums of a measure. Example: Ratio(5, 6): 5 of 6 pairs agree."""

    numerator: float
    denominator: float


class Measure(msgspec.Struct, frozen=True):
    """A measure with its 95 % bootstrap interval (Efron 1979) over the `num` groups with a positive denominator."""

    value: float
    low: float
    high: float
    num: int

    @property
    def stands_out(self) -> bool:
        """Whether the value differs significantly from 0."""
        return self.num >= MIN_GROUPS and self.low * self.high > 0


def measure(ratios: Sequence[Ratio], *, seed: int = 0) -> Measure | None:
    """Returns the ratio of the sums; None if all denominators are 0. A single group has an interval of length 0."""
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
    """Returns (pairs ordered like the gold, pairs with different gold). A tie counts one half."""
    signs = [pair for pair in _pair_signs(scores, gold) if pair.gold]
    return Ratio(sum((1 + pair.score * pair.gold) / 2 for pair in signs), len(signs))


def pair_flips(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns (pairs ordered against the gold, pairs with different gold). A tie in `scores` is not a flip."""
    signs = _pair_signs(scores, gold)
    return Ratio(sum(pair.score * pair.gold < 0 for pair in signs), sum(pair.gold != 0 for pair in signs))


def kendall_tau(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns Kendall's tau-b (1945) as (tau, 1); (0, 0) if either side is constant, because tau is undefined.

    tau_b = (C - D) / sqrt((n0 - ties in scores) (n0 - ties in gold)), n0 = n (n - 1) / 2.
    """
    signs = _pair_signs(scores, gold)
    untied = sum(pair.score != 0 for pair in signs) * sum(pair.gold != 0 for pair in signs)
    balance = sum(pair.score * pair.gold for pair in signs)
    return Ratio(balance / math.sqrt(untied), 1.0) if untied else Ratio(0.0, 0.0)


class _PairSigns(NamedTuple):
    """The order of two attempts: 1, 0 (tie) or -1."""

    score: int
    gold: int


def _pair_signs(scores: Sequence[float], gold: Sequence[float]) -> list[_PairSigns]:
    pairs = combinations(zip(scores, gold, strict=True), 2)
    return [_PairSigns(_sign(score - other), _sign(true - other_true)) for (score, true), (other, other_true) in pairs]


def best_of_group(scores: Sequence[float], gold: Sequence[float]) -> Ratio:
    """Returns (probability that the highest score has the best gold, 1); (0, 0) for constant gold.

    Ties for the highest score are broken uniformly at random.
    """
    if not gold or max(gold) - min(gold) <= EQUAL_REWARDS:
        return Ratio(0.0, 0.0)
    top = [true for score, true in zip(scores, gold, strict=True) if score >= max(scores) - EQUAL_REWARDS]
    return Ratio(sum(true >= max(gold) - EQUAL_REWARDS for true in top) / len(top), 1.0)


def slope(xs: Sequence[float], ys: Sequence[float]) -> Ratio:
    """Returns (sum dx dy, sum dx dx) about a group's means: its contribution to the least-squares slope of y on x."""
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
    """Rates of wrong 0/1 rewards. Example: 30 of 200 wrong attempts got a 1: false_positive 0.15."""

    false_positive: Measure  # share of the attempts with gold 0 that got a 1
    false_negative: Measure  # share of the attempts with gold 1 that got a 0
    num_wrong: int  # attempts with gold 0
    num_right: int  # attempts with gold 1

    @property
    def is_usable(self) -> bool:
        """Whether `judge.noise` accepts the rates, at the three digits shown: verdicts depend on the truth."""
        return round(self.false_positive.value, 3) + round(self.false_negative.value, 3) < 1


def flip_rates(rewards: Sequence[Sequence[float]], golds: Sequence[Sequence[float]]) -> FlipRates | None:
    """Returns the flip rates; None for values other than 0 and 1, or for constant gold."""
    if any(value not in (0, 1) for groups in (rewards, golds) for values in groups for value in values):
        return None
    counts = []
    for truth in (0, 1):
        found = []
        for given, gold in zip(rewards, golds, strict=True):
            said = [reward for reward, true in zip(given, gold, strict=True) if true == truth]
            found.append(Ratio(sum(reward != truth for reward in said), len(said)))
        counts.append(found)
    wrong, right = (rate(found) for found in counts)
    if wrong is None or right is None:
        return None
    return FlipRates(wrong, right, *(round(sum(ratio.denominator for ratio in found)) for found in counts))


def rate(ratios: Sequence[Ratio]) -> Measure | None:
    """Returns the rate with its interval; rates of 0 and 1 get an exact bound, because every resample repeats them.

    The bound is Clopper and Pearson's (1934), 1 - 0.025 ** (1 / num). It counts groups as trials, because attempts
    within a group may share an error.
    """
    found = measure(ratios)
    if found is None or 0 < found.value < 1:
        return found
    bound = 1 - 0.025 ** (1 / found.num)
    return Measure(found.value, 0.0, bound, found.num) if found.value == 0 else Measure(1.0, 1 - bound, 1.0, found.num)


class VoteReliability(msgspec.Struct, frozen=True):
    """The share of the differences within a group that repeats from vote to vote; at most 1.

    The intraclass correlations ICC(3,k) and ICC(3,1) of Shrout and Fleiss (1979), pooled over groups. Negative if votes
    differ more than attempts.
    """

    all_votes: Measure  # reliability of the mean of an attempt's votes
    one_vote: Measure  # reliability of a single vote


def vote_reliability(groups: Sequence[Sequence[Sequence[float]]]) -> VoteReliability | None:
    """Returns the reliability from [A][k] votes per group; None if no group has two attempts and two different votes.

    With s^2 the variance of the attempts' means and v the error variance of a mean: sum(s^2 - v) / sum(s^2) over
    groups, and sum(s^2 - v) / sum(s^2 + (k - 1) v), because a single vote has error variance k v.
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
