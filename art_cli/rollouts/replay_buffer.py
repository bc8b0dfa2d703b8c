"""The choice of groups of earlier steps to train on again. Numbers and ids in, ids out.

Candidates are the groups with signal of the last `max_age` steps. They are drawn without repetition, each with a
probability among those left that follows the variance of its rewards divided by its age in steps: how much it teaches,
and how far the policy has moved since. A group may be drawn again by a later step.

Replay of aged rollouts under importance weights: RePO, Li et al. 2025 (arXiv:2506.09340), whose strategies of choosing
by recency and by variance are joined here.
"""

from typing import NamedTuple

from art_cli.rollouts.adaptive import History, draw, squared_deviations
from art_cli.runs.trajectory import has_signal


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
