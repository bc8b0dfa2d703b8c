"""AdaptiveOrder: plays more often what is neither solved nor hopeless; Replay: an earlier group to train on again.

Both take numbers and ids, and return indices or ids.

A group teaches as much as its rewards differ. For a success rate p the variance of a reward is p(1 - p): 0 for what is
solved or hopeless, 1/4 at most. Each step draws its scenarios with probabilities that follow the variance expected of
each one's next group:

    signal = (PRIOR_DEGREES * PRIOR_SIGNAL + sum of d * S) / (PRIOR_DEGREES + sum of d * f)

over the past groups of the scenario, or of its pool. S is the sum of squared deviations from the group's mean, f its
degrees of freedom (attempts with a reward - 1), and d = 2^(-age / half-life) discounts what an older policy did. So a
solved scenario slowly comes back to the prior, and with it into play.

Candidates of a replay are the groups with signal of the last `max_age` steps. They are drawn without repetition, each
with a probability among those left that follows the variance of its rewards divided by its age in steps: how much it
teaches, and how far the policy has moved since. A group may be drawn again by a later step. Replay of aged rollouts
under importance weights is RePO, Li et al. 2025 (arXiv:2506.09340), whose strategies of choosing by recency and by
variance are joined here.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from art_cli.runs.trajectory import GroupRewards, has_signal

PRIOR_SIGNAL = 1 / 6  # the mean of p(1 - p) where every success rate p is as likely: 1/2 - 1/3
PRIOR_DEGREES = 2.0  # the prior counts as much as this many degrees of freedom, as Beta(1, 1) counts as two attempts
EXPLORED_SHARE = 0.1  # share of the probability that all scenarios have alike, whatever was seen of them
MIN_HALF_LIFE = 8.0  # steps; fewer would forget a group before its scenario is drawn again

History = Mapping[int, Sequence[GroupRewards]]  # step -> its groups


class AdaptiveOrder:
    """The choice of the scenarios that each step plays, without repetition, by the signal expected of them.

    A pure function of ids, pools, seed, step and history. It does not depend on the order of the ids.
    """

    def __init__(self, ids: Sequence[str | int], *, seed: int, pools: Sequence[str] | None = None) -> None:
        """`pools` are the pools of the scenarios, whose groups are seen as one; None means a pool for each."""
        assert ids, "no scenarios to order"
        self._ids = [str(id) for id in ids]
        self._pools = list(pools) if pools is not None else self._ids
        self._seed = seed

    def groups(self, step: int, groups_per_step: int, num_spare: int, history: History) -> list[int]:
        """Indices in `ids` of the scenarios that a step plays, then of the `num_spare` that it may refill with.

        Where more are wanted than there are, all of them are drawn a second time, and so on.
        """
        half_life = max(MIN_HALF_LIFE, len(set(self._pools)) / groups_per_step)
        probabilities = self.probabilities(expected_signal(history, step=step, half_life=half_life))
        drawn: list[int] = []
        while len(drawn) < groups_per_step + num_spare:
            drawn += draw(f"{self._seed}/{step}/{len(drawn)}", self._ids, probabilities)
        return drawn[: groups_per_step + num_spare]

    def probabilities(self, signals: Mapping[str, float]) -> list[float]:
        """Of each scenario, to be drawn first. `signals` are by pool; one that is missing has the prior's."""
        found = [signals.get(pool, PRIOR_SIGNAL) for pool in self._pools]
        total, same = math.fsum(found), EXPLORED_SHARE / len(found)
        if total == 0:
            return [1 / len(found)] * len(found)
        return [(1 - EXPLORED_SHARE) * value / total + same for value in found]


def draw(key: str, ids: Sequence[str], weights: Sequence[float]) -> list[int]:
    """Returns all indices in the order of drawing one after the other, each with its weight's share among those left.

    Weights are above 0. Efraimidis and Spirakis 2006: sorted by u^(1/w), u uniform in (0, 1), largest first. Here by
    -log(u) / w, smallest first, with u from a hash of key and id.
    """
    times = [-math.log(_uniform(f"{key}/{id}")) / w for id, w in zip(ids, weights, strict=True)]
    return sorted(range(len(times)), key=times.__getitem__)


def expected_signal(history: History, *, step: int, half_life: float) -> dict[str, float]:
    """Pool -> the variance expected between the rewards of its next group; only pools that were seen.

    Rewards outside of [0, 1] anywhere in the history are measured in the range seen. A group with fewer than two
    rewards, because its attempts failed, counts as one whose rewards are all equal.
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
    """Returns a number in (0, 1), the same for the same key."""
    return (int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) + 0.5) / 2**64


class Replay(NamedTuple):
    """A group to train on again. Example: Replay(3, "s0003-g0002")."""

    step: int
    group_id: str


def choose_replays(history: History, *, step: int, num: int, max_age: int, seed: int) -> list[Replay]:
    """Returns at most `num` groups; fewer where there are fewer candidates. A pure function of its arguments."""
    candidates, weights = [], []
    for past in sorted(history):
        if not 1 <= step - past <= max_age:
            continue
        for group in history[past]:
            if has_signal(group.rewards):
                candidates.append(Replay(past, group.group_id))
                weights.append(squared_deviations(group.rewards) / (len(group.rewards) - 1) / (step - past))
    order = draw(f"{seed}/replay/{step}", [group_id for _, group_id in candidates], weights)
    return [candidates[index] for index in order[:num]]
