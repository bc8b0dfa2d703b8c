"""AdaptiveOrder: prefers scenarios that are neither solved nor hopeless. It uses only numbers and ids.

A group teaches more if its rewards differ more. With a success rate p, the variance of a reward is p(1 - p): 0 for
solved or hopeless scenarios, and at most 1/4. Each step draws scenarios with probabilities proportional to the expected
variance of their next group:

    signal = (PRIOR_DEGREES * PRIOR_SIGNAL + sum of d * S) / (PRIOR_DEGREES + sum of d * f)

The sums run over past groups of the scenario or its pool. S is the sum of squared deviations from the group's mean, f
the degrees of freedom (attempts with a reward - 1), and d = 2^(-age / half-life) discounts groups of older policies. A
solved scenario therefore slowly returns to the prior and is drawn again.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from art_cli.runs.trajectory import GroupRewards

PRIOR_SIGNAL = 1 / 6  # the mean of p(1 - p) where every success rate p is as likely: 1/2 - 1/3
PRIOR_DEGREES = 2.0  # the prior counts as much as this many degrees of freedom, as Beta(1, 1) counts as two attempts
EXPLORED_SHARE = 0.1  # share of the probability that is divided equally among all scenarios
MIN_HALF_LIFE = 8.0  # steps; a shorter half-life would forget a group before its scenario is drawn again

History = Mapping[int, Sequence[GroupRewards]]  # step -> its groups


class AdaptiveOrder:
    """Chooses the scenarios for each step by expected signal, without repetition within the step.

    A pure function of ids, pools, seed, step, and history. The order of the ids does not matter.
    """

    def __init__(self, ids: Sequence[str | int], *, seed: int, pools: Sequence[str] | None = None) -> None:
        """Scenarios in the same pool share their history. By default each scenario has a separate pool."""
        assert ids, "no scenarios to order"
        self._ids = [str(id) for id in ids]
        self._pools = list(pools) if pools is not None else self._ids
        self._seed = seed

    def groups(self, step: int, groups_per_step: int, num_spare: int, history: History) -> list[int]:
        """Returns indices into `ids`: the step's scenarios, then spare ones. Scenarios repeat if there are too few."""
        half_life = max(MIN_HALF_LIFE, len(set(self._pools)) / groups_per_step)
        probabilities = self.probabilities(expected_signal(history, step=step, half_life=half_life))
        drawn: list[int] = []
        while len(drawn) < groups_per_step + num_spare:
            drawn += draw(f"{self._seed}/{step}/{len(drawn)}", self._ids, probabilities)
        return drawn[: groups_per_step + num_spare]

    def probabilities(self, signals: Mapping[str, float]) -> list[float]:
        """Returns each scenario's probability to be drawn first. `signals` has pools; others have the prior."""
        found = [signals.get(pool, PRIOR_SIGNAL) for pool in self._pools]
        total, same = math.fsum(found), EXPLORED_SHARE / len(found)
        if total == 0:
            return [1 / len(found)] * len(found)
        return [(1 - EXPLORED_SHARE) * value / total + same for value in found]


def draw(key: str, ids: Sequence[str], weights: Sequence[float]) -> list[int]:
    """Returns all indices in random order, drawn one by one with probabilities proportional to the remaining weights.

    Weights are positive. Efraimidis and Spirakis 2006 sort by u^(1/w), largest first, with u uniform in (0, 1). This
    function sorts by -log(u) / w, smallest first, and takes u from a hash of key and id.
    """
    times = [-math.log(_uniform(f"{key}/{id}")) / w for id, w in zip(ids, weights, strict=True)]
    return sorted(range(len(times)), key=times.__getitem__)


def expected_signal(history: History, *, step: int, half_life: float) -> dict[str, float]:
    """Maps each known pool to the expected reward variance of its next group.

    If any reward in the history is outside of [0, 1], rewards are divided by the observed range. A group with fewer
    than two rewards, because its attempts failed, counts as a group with equal rewards.
    """
    scale = reward_scale(history)
    squares, degrees = defaultdict[str, float](float), defaultdict[str, float](float)
    for past in sorted(history):
        discount = 2.0 ** ((past - step) / half_life)
        for group in history[past]:
            squares[group.pool] += discount * squared_deviations([reward / scale for reward in group.rewards])
            degrees[group.pool] += discount * (max(len(group.rewards), 2) - 1)
    return {pool: (PRIOR_DEGREES * PRIOR_SIGNAL + squares[pool]) / (PRIOR_DEGREES + degrees[pool]) for pool in squares}


def reward_scale(history: History) -> float:
    """1 where all rewards are in [0, 1], else their range."""
    rewards = [reward for groups in history.values() for group in groups for reward in group.rewards]
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    return 1.0 if low >= 0 and high <= 1 else (high - low) or 1.0


def squared_deviations(rewards: Sequence[float]) -> float:
    """Returns the sum of (reward - mean)^2; 0 for less than two."""
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards)


def _uniform(key: str) -> float:
    """Returns a number in (0, 1) from a hash of the key."""
    return (int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) + 0.5) / 2**64
