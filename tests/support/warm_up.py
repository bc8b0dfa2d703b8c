"""A whole supervised warm-up in one call."""

from collections.abc import Sequence
from typing import Any

from art_cli.learners import Learner


def warm_up(learner: Learner, demos: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers of all the warm-up's updates."""
    num_updates = learner.begin_sft(demos)
    numbers = learner.take_sft(num_updates)
    learner.end_sft()
    return numbers
