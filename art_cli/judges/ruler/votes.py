"""Votes: the order each vote shows the attempts in, what several votes come to, and one scale for large groups.

Pure. Orders come in pairs, a seeded one and its reverse. A judge's bias towards a position, by its distance from the
middle of the prompt, cancels in every pair; from pair to pair the order is drawn anew, which evens out the rest.

Attempts that do not fit in one call are judged in parts that share anchors. The first part is drawn by seed and judged.
Anchors are picked from it, spread from its worst to its best, and shown again in every other part. A judge's scores are
relative to the attempts shown together, so each other part is brought to the scale of the first by the affine map that
takes its anchors' scores to those that they got in the first part.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

# Variance of a judge's own noise on a score (0.05 squared). It holds a slope near 1 when the anchors are alike.
NOISE = 0.0025
MIN_SLOPE, MAX_SLOPE = 0.25, 4.0


def order(count: int, *, seed: str, vote: int) -> list[int]:
    """Returns the attempts (0 .. count - 1) in the order in which vote number `vote` shows them."""
    indices = list(range(count))
    random.Random(f"{seed}:{vote // 2}").shuffle(indices)
    return indices[::-1] if vote % 2 else indices


def aggregate(votes: Sequence[float], how: Literal["mean", "median"]) -> float:
    """Returns the mean or the median of the votes."""
    return statistics.median(votes) if how == "median" else statistics.fmean(votes)


def spread(votes: Sequence[float]) -> float | None:
    """Standard deviation of the votes (n - 1 in the denominator); None for fewer than two."""
    return statistics.stdev(votes) if len(votes) > 1 else None


# --- groups larger than one call --------------------------------------------------------------------------------------


class AffineMap(NamedTuple):
    """score -> slope * score + offset. Example: AffineMap(1.0, 0.0) changes nothing."""

    slope: float
    offset: float

    def __call__(self, score: float) -> float:
        return self.slope * score + self.offset


def split(count: int, *, max_group: int, seed: str) -> list[list[int]]:
    """Returns the first part, of `max_group` attempts, then the newcomers of each other part, beside the anchors.

    Example: count 20, max_group 8 (2 anchors): parts of 8, 6, 6. The sizes of the others differ by one at most.
    """
    indices = list(range(count))
    random.Random(f"{seed}:parts").shuffle(indices)
    first, rest = indices[:max_group], indices[max_group:]
    num_parts = -(-len(rest) // (max_group - num_anchors(max_group)))
    return [first, *(rest[part::num_parts] for part in range(num_parts))]


def num_anchors(max_group: int) -> int:
    """Returns a quarter of a call's attempts, and two at least, because a line needs two points."""
    return max(2, max_group // 4)


def choose_anchors(scores: Sequence[float], count: int) -> list[int]:
    """Indices of `count` scores at even distances in rank, the lowest and the highest among them."""
    ranked = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    return [ranked[round(step * (len(ranked) - 1) / (count - 1))] for step in range(count)]


def fit(here: Sequence[float], there: Sequence[float]) -> AffineMap:
    """Returns the map from the anchors' scores `here` to those `there`: least squares, its slope held near 1.

    slope = (cov(here, there) + NOISE) / (var(here) + NOISE). Anchors that are all alike give a shift, slope 1.
    """
    mean_here, mean_there = sum(here) / len(here), sum(there) / len(there)
    variance = sum((x - mean_here) ** 2 for x in here) / len(here)
    covariance = sum((x - mean_here) * (y - mean_there) for x, y in zip(here, there, strict=True)) / len(here)
    slope = min(MAX_SLOPE, max(MIN_SLOPE, (covariance + NOISE) / (variance + NOISE)))
    return AffineMap(slope, mean_there - slope * mean_here)


def into_range(scores: Sequence[float]) -> AffineMap:
    """Returns the map that brings scores back into [0, 1] in their order; it changes nothing if all are inside."""
    low, high = min(scores), max(scores)
    if low >= 0 and high <= 1:
        return AffineMap(1.0, 0.0)
    bottom, top = max(low, 0.0), min(high, 1.0)
    slope = (top - bottom) / (high - low) if high > low else 0.0
    return AffineMap(slope, bottom - slope * low)
