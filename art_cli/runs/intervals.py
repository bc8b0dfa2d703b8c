"""Confidence intervals: Student's t for means (`art eval`, `art report`, `art view`), Wilson for shares. Pure
functions."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import msgspec

# share of intervals that miss the true mean; also the false alarm rate for falling rewards in unchanged runs
LEVEL = 0.05
MIN_SCENARIOS = 3  # fewer scenarios give no interval


class Interval(msgspec.Struct, frozen=True):
    """A mean and its confidence interval. Example: Interval(-0.085, -0.15, -0.02)"""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval | None:
    """Returns the mean and its 1 - `level` confidence interval by Student's t. Too few values give None."""
    if len(values) < MIN_SCENARIOS:
        return None
    mean = fmean(values)
    half = student(1 - level / 2, len(values) - 1) * stdev(values, mean) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def share_interval(share: float, num: int) -> tuple[float, float]:
    """Returns the 95 % interval (Wilson 1927) of a share observed in `num` draws. Shares 0 and 1 are fine."""
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    middle, half = share + z**2 / (2 * num), z * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return (middle - half) / (1 + z**2 / num), (middle + half) / (1 + z**2 / num)


def student(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t as an expansion around the normal quantile (Abramowitz and Stegun 26.7.5).

    The error at the 0.975 quantile is below 3 % for 2 degrees of freedom and below 0.1 % from 6 on.
    """
    z = NormalDist().inv_cdf(probability)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
