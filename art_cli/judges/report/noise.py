"""A judge's errors in a scored file, in the form that `judge.noise` takes.

Flip rates: a judge that gives 0 or 1, against a gold of 0 and 1. Reliability: a judge that votes several times, against
itself. Pure numbers, no files. `art_cli/runs/reliability.py` has what training makes of either.
"""

from collections.abc import Sequence

import msgspec

from art_cli.judges.report.agreement import Measure, Ratio, measure
from art_cli.runs.reliability import error_variance


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
