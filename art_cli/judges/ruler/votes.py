"""Votes: attempt order per vote, their spread, and a common scale for large groups.

Pure. Orders come in pairs, a seeded order and the reverse order. A position bias that is antisymmetric about the middle
of the prompt cancels within each pair. Every pair uses a new random order, which averages out the remaining bias.

Groups too large for a single call are judged in parts with shared anchors. The first part is drawn by seed and judged.
Anchors are attempts from this part, spread from worst to best, and all other parts show them again. Scores are relative
to the attempts shown together, so an affine map fitted to the anchors' scores brings all parts to a common scale.
"""

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Noise variance of a single score (0.05 squared). Keeps the slope near 1 for similar anchors.
NOISE = 0.0025
MIN_SLOPE, MAX_SLOPE = 0.25, 4.0


def order(count: int, *, seed: str, vote: int) -> list[int]:
    """Returns the attempt order (indices 0 .. count - 1) for vote number `vote`."""
    indices = list(range(count))
    random.Random(f"{seed}:{vote // 2}").shuffle(indices)
    return indices[::-1] if vote % 2 else indices


def spread(votes: Sequence[float]) -> float | None:
    """Returns the standard deviation of votes (n - 1 in the denominator); needs at least two votes."""
    return statistics.stdev(votes) if len(votes) > 1 else None


# --- groups larger than one call --------------------------------------------------------------------------------------


class AffineMap(NamedTuple):
    """score -> slope * score + offset. Example: AffineMap(1.0, 0.0) is the identity."""

    slope: float
    offset: float

    def __call__(self, score: float) -> float:
        return self.slope * score + self.offset


def split(count: int, *, max_group: int, seed: str) -> list[list[int]]:
    """Returns the first part (`max_group` attempts), then the new attempts of each other part, without anchors.

    Example: count 20, max_group 8 (2 anchors): parts of 8, 6, 6. The sizes of later parts differ by at most one.
    """
    indices = list(range(count))
    random.Random(f"{seed}:parts").shuffle(indices)
    first, rest = indices[:max_group], indices[max_group:]
    num_parts = -(-len(rest) // (max_group - num_anchors(max_group)))
    return [first, *(rest[part::num_parts] for part in range(num_parts))]


def num_anchors(max_group: int) -> int:
    """Returns a quarter of `max_group`, but at least two, because fitting a line needs two points."""
    return max(2, max_group // 4)


def choose_anchors(scores: Sequence[float], count: int) -> list[int]:
    """Returns indices of `count` scores, evenly spaced by rank, including the lowest and highest."""
    ranked = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    return [ranked[round(step * (len(ranked) - 1) / (count - 1))] for step in range(count)]


def fit(here: Sequence[float], there: Sequence[float]) -> AffineMap:
    """Returns the least-squares map from anchor scores `here` to `there`, with the slope shrunk toward 1.

    slope = (cov(here, there) + NOISE) / (var(here) + NOISE). Equal anchor scores give a pure shift, slope 1.
    """
    mean_here, mean_there = sum(here) / len(here), sum(there) / len(there)
    variance = sum((x - mean_here) ** 2 for x in here) / len(here)
    covariance = sum((x - mean_here) * (y - mean_there) for x, y in zip(here, there, strict=True)) / len(here)
    slope = min(MAX_SLOPE, max(MIN_SLOPE, (covariance + NOISE) / (variance + NOISE)))
    return AffineMap(slope, mean_there - slope * mean_here)


def into_range(scores: Sequence[float]) -> AffineMap:
    """Returns the order-preserving map into [0, 1]; the identity if all scores are already inside."""
    low, high = min(scores), max(scores)
    if low >= 0 and high <= 1:
        return AffineMap(1.0, 0.0)
    bottom, top = max(low, 0.0), min(high, 1.0)
    slope = (top - bottom) / (high - low) if high > low else 0.0
    return AffineMap(slope, bottom - slope * low)
