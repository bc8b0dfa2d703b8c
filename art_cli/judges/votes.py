"""Votes: the order each one shows the attempts in, and what several of them come to.

Pure. Orders come in pairs, a seeded one and its reverse, so that what a judge gives to a place for its distance from
the middle of the prompt cancels in every pair; from pair to pair the order is drawn anew, which evens out the rest.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Literal


def order(count: int, *, seed: str, vote: int) -> list[int]:
    """The attempts (0 .. count - 1) as vote number `vote` shows them."""
    places = list(range(count))
    random.Random(f"{seed}:{vote // 2}").shuffle(places)
    return places[::-1] if vote % 2 else places


def aggregate(votes: Sequence[float], how: Literal["mean", "median"]) -> float:
    """What the votes come to, in [0, 1] when they are."""
    return statistics.median(votes) if how == "median" else statistics.fmean(votes)


def spread(votes: Sequence[float]) -> float | None:
    """Standard deviation of the votes (n - 1 in the denominator); None below two."""
    return statistics.stdev(votes) if len(votes) > 1 else None
