"""A whole supervised warm-up in one call."""

from collections.abc import Sequence
from typing import Any

from art_cli.learners import Learner


def warm_up(
    learner: Learner, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()
) -> dict[str, float]:
    """The numbers of all the warm-up's updates."""
    num_updates = learner.begin_sft(examples, evaluated)
    taken = learner.take_sft(num_updates)
    learner.end_sft()
    assert taken.is_done
    return taken.numbers
