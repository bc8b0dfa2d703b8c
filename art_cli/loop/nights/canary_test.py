"""CanaryTest: decides from ratings whether a candidate is better than the promoted policy, with a bound on errors.

A block is a rating of the candidate and k ratings of the promoted policy, the newest that no block has. Its
difference d, the candidate's rating minus the mean of the others, is in [-1, 1]. As long as the candidate is not
better, the mean of d is at most 0. Then a gambler who bets a fraction f of the wealth on every d > 0, so that d
multiplies it by 1 + f d, reaches the wealth 1 / error with a probability of at most `error`, no matter how
often the test looks (Ville 1939). The gambler here divides the wealth evenly among several fractions, because the best
fraction depends on the unknown difference (Waudby-Smith and Ramdas 2023, arXiv 2010.09686, section 4). A second
gambler bets on d < 0.

Ratings are compared within each policy. A policy whose users rate less often is therefore not at a disadvantage. The
ratings of a block are of about the same time, also when one policy gets more of them, because the oldest ones that wait
are left out. Otherwise a drift of all ratings would look like a difference of the policies.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

Key = TypeVar("Key", str, tuple[str, str])
Verdict = Literal["better", "worse", "open"]

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
MAX_WAITING = 10  # blocks of ratings that wait for ratings of the other policy
FIRST_LOOK = 0.25  # the share of the ratings before which no test is behind
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
        self._waiting = [deque[float](maxlen=MAX_WAITING * size) for size in self._sizes]  # promoted, candidate
        self._up, self._down = [0.0] * len(FRACTIONS), [0.0] * len(FRACTIONS)  # log wealth by fraction
        self._counted = Counter[str](), Counter[tuple[str, str]]()  # ratings by client, by (client, user)
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

    def is_behind(self, done: float) -> bool:
        """Returns whether the test will hardly show a gain. `done` is the share of the ratings that it may take.

        The logarithm of the wealth has to rise to the bound. From a quarter of the ratings on, the test is behind below
        a line that starts at minus half of the bound and ends at plus half of it.
        """
        return done >= FIRST_LOOK and _log_mean(self._up) < self._bound * (done - 0.5)

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
            promoted, candidate = (
                fmean(its.pop() for _ in range(size)) for its, size in zip(self._waiting, self._sizes, strict=True)
            )
            self._bet(candidate - promoted)

    def _bet(self, difference: float) -> None:
        self._up = [w + math.log1p(f * (difference + self._margin)) for w, f in zip(self._up, FRACTIONS, strict=True)]
        self._down = [w + math.log1p(-f * difference) for w, f in zip(self._down, FRACTIONS, strict=True)]
        if _log_mean(self._up) >= self._bound:
            self.verdict = "better"
        elif _log_mean(self._down) >= self._bound:
            self.verdict = "worse"

    def _may_count(self, rating: Rating) -> bool:
        """Decides from earlier ratings only, so the test's bound on errors stays valid."""
        clients, users = self._counted
        if not self._has_room(clients, rating.client):
            return False
        if rating.user and not self._has_room(users, (rating.client, rating.user)):
            return False
        clients[rating.client] += 1
        if rating.user:
            users[rating.client, rating.user] += 1
        return True

    def _has_room(self, counted: Counter[Key], key: Key) -> bool:
        share = max(self._client_share, 2 / (len(counted) + (key not in counted)))
        return counted[key] < max(FEWEST, share * (self.num + 1))


def _log_mean(logs: list[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs) / len(logs))
