"""Short attentions that share a call: neighbours join while their padding costs less than another call.

The engine joins chunks of prompts by it, the learner short segments of a tree. Measured on a CPU with float32.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

CALL_COST = 8192  # pairs of a query and a key that are attended in the time that one more call takes


def join_calls(items: Iterable[Item], num_pairs: Callable[[Sequence[Item]], int]) -> list[list[Item]]:
    """Returns the items in order, neighbours grouped.

    `num_pairs`: what one call for a group computes, padding included.
    """
    groups: list[list[Item]] = []
    for item in items:
        if groups and num_pairs([*groups[-1], item]) < num_pairs(groups[-1]) + num_pairs([item]) + CALL_COST:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
