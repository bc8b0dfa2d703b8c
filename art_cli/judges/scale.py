"""Judges more attempts than fit in one call: in parts that share anchors, put on one scale.

Pure. The first part is drawn by seed and judged. Anchors are picked from it, spread from its worst to its best, and
shown again in every other part. A judge's scores are relative to the company, so each other part is brought to the
scale of the first by the line that takes its anchors' scores there to those they got in the first.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

# The variance of a judge's own noise on a score (0.05 squared): how strongly a slope is held near 1 by like anchors.
NOISE = 0.0025
MIN_SLOPE, MAX_SLOPE = 0.25, 4.0


class Line(NamedTuple):
    """score -> slope * score + offset. Example: Line(1.0, 0.0) changes nothing."""

    slope: float
    offset: float

    def __call__(self, score: float) -> float:
        return self.slope * score + self.offset


def split(count: int, *, max_group: int, seed: str) -> list[list[int]]:
    """The first part, of `max_group`, and the newcomers of each other part, which leave room for the anchors.

    Example: count 20, max_group 8 (2 anchors): parts of 8, 6, 6. The sizes of the others differ by one at most.
    """
    places = list(range(count))
    random.Random(f"{seed}:parts").shuffle(places)
    first, rest = places[:max_group], places[max_group:]
    num_parts = -(-len(rest) // (max_group - num_anchors(max_group)))
    return [first, *(rest[part::num_parts] for part in range(num_parts))]


def num_anchors(max_group: int) -> int:
    """A quarter of a call's attempts, and two at least: a line needs two points."""
    return max(2, max_group // 4)


def choose_anchors(scores: Sequence[float], count: int) -> list[int]:
    """Places of `count` scores at even distances in rank, the lowest and the highest among them."""
    ranked = sorted(range(len(scores)), key=lambda place: (scores[place], place))
    return [ranked[round(step * (len(ranked) - 1) / (count - 1))] for step in range(count)]


def fit(here: Sequence[float], there: Sequence[float]) -> Line:
    """The line that takes the anchors' scores `here` to those `there`: least squares, its slope held near 1.

    slope = (cov(here, there) + NOISE) / (var(here) + NOISE): anchors that are all alike give a shift, slope 1.
    """
    mean_here, mean_there = sum(here) / len(here), sum(there) / len(there)
    variance = sum((x - mean_here) ** 2 for x in here) / len(here)
    covariance = sum((x - mean_here) * (y - mean_there) for x, y in zip(here, there, strict=True)) / len(here)
    slope = min(MAX_SLOPE, max(MIN_SLOPE, (covariance + NOISE) / (variance + NOISE)))
    return Line(slope, mean_there - slope * mean_here)


def squeeze(scores: Sequence[float]) -> Line:
    """The line that brings scores back into [0, 1], order kept; it changes nothing where all are inside."""
    low, high = min(scores), max(scores)
    if low >= 0 and high <= 1:
        return Line(1.0, 0.0)
    bottom, top = max(low, 0.0), min(high, 1.0)
    slope = (top - bottom) / (high - low) if high > low else 0.0
    return Line(slope, bottom - slope * low)
