"""CanaryTest: decides from ratings whether a candidate is better than the promoted policy, with a bound on errors.

A block is a rating of the candidate and k ratings of the promoted policy, in the order of their arrival. Its
difference d, the candidate's rating minus the mean of the others, is in [-1, 1]. As long as the candidate is not
better, the mean of d is at most 0. Then a gambler who bets a fraction f of the wealth on every d > 0, so that d
multiplies it by 1 + f d, reaches the wealth 1 / error with a probability of at most `error`, no matter how often
somebody looks (Ville 1939). The gambler here divides the wealth evenly among several fractions, because the best
fraction depends on the unknown difference (Waudby-Smith and Ramdas 2023, arXiv 2010.09686, section 4). A second
gambler bets on d < 0.

Ratings are compared within each policy. A policy whose users rate less often is therefore not at a disadvantage.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

Verdict = Literal["better", "worse", "open"]

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
FEWEST = 3  # ratings that every client may give before its share counts


class Rating(NamedTuple):
    """A rated conversation. Example: Rating(is_candidate=True, value=1.0, client="key 2", user="u17")"""

    is_candidate: bool
    value: float  # 0 to 1, more is better
    client: str
    user: str = ""


class Side(NamedTuple):
    num: int
    mean: float


class CanaryTest:
    """Example: `test.add(Rating(True, 1.0, "key 1"))`, then `test.verdict`."""

    def __init__(self, *, share: float, error: float, margin: float = 0.0, client_share: float = 1.0) -> None:
        """`share` of the conversations goes to the candidate. `error` bounds the probability of "better" for a
        candidate that is worse by at least `margin` (0: not better), and of "worse" for a candidate that is not worse.

        `client_share` is the largest share of the ratings that a client counts for, and a user of a client; or twice
        an even share, if this is more.
        """
        self._sizes = (max(1, round((1 - share) / share)), max(1, round(share / (1 - share))))  # promoted, candidate
        self._bound, self._margin, self._client_share = math.log(1 / error), margin, client_share
        self._waiting: tuple[list[float], list[float]] = ([], [])  # promoted, candidate
        self._up, self._down = [0.0] * len(FRACTIONS), [0.0] * len(FRACTIONS)  # log wealth by fraction
        self._counted: Counter[tuple[str, ...]] = Counter()
        self._sums: list[Side] = [Side(0, 0.0), Side(0, 0.0)]
        self.num_capped = 0  # ratings left out because their client had counted for its share
        self.verdict: Verdict = "open"

    @property
    def promoted(self) -> Side:
        return self._sums[0]

    @property
    def candidate(self) -> Side:
        return self._sums[1]

    @property
    def num(self) -> int:
        return self.promoted.num + self.candidate.num

    def add_all(self, ratings: Iterable[Rating]) -> None:
        """Counts ratings until the test has decided."""
        for rating in ratings:
            if self.verdict != "open":
                return
            self.add(rating)

    def add(self, rating: Rating) -> None:
        if not self._may_count(rating):
            self.num_capped += 1
            return
        num, mean = self._sums[rating.is_candidate]
        self._sums[rating.is_candidate] = Side(num + 1, mean + (rating.value - mean) / (num + 1))
        self._waiting[rating.is_candidate].append(rating.value)
        if all(len(its) >= size for its, size in zip(self._waiting, self._sizes, strict=True)):
            means = [sum(its[:size]) / size for its, size in zip(self._waiting, self._sizes, strict=True)]
            for its, size in zip(self._waiting, self._sizes, strict=True):
                del its[:size]
            self._bet(means[1] - means[0])

    def _bet(self, difference: float) -> None:
        self._up = [w + math.log1p(f * (difference + self._margin)) for w, f in zip(self._up, FRACTIONS, strict=True)]
        self._down = [w + math.log1p(-f * difference) for w, f in zip(self._down, FRACTIONS, strict=True)]
        if _log_mean(self._up) >= self._bound:
            self.verdict = "better"
        elif _log_mean(self._down) >= self._bound:
            self.verdict = "worse"

    def _may_count(self, rating: Rating) -> bool:
        """Decides from earlier ratings only, so the test's bound on errors stays valid."""
        keys = [(rating.client,), (rating.client, rating.user)] if rating.user else [(rating.client,)]
        for key in keys:
            num_alike = sum(len(each) == len(key) for each in self._counted.keys() | {key})
            share = max(self._client_share, 2 / num_alike)
            if self._counted[key] >= max(FEWEST, share * (self.num + 1)):
                return False
        self._counted.update(keys)
        return True


def _log_mean(logs: list[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs) / len(logs))
