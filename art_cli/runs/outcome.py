"""Outcome: a rollout's return value, and the limit for its numbers.

Only uses the standard library, because the Python that runs rollouts may lack other packages (rollouts/bootstrap.py).
"""

from dataclasses import dataclass, field
from typing import Any

MAX_NUMBER = 1e30  # largest absolute reward or metric; summing a million squares stays far below overflow


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A rollout result with more than a reward.

    Example: Outcome(reward=1.0, metrics={"moves": 5, "won": 1}, metadata={"final_board": "XOX..."})
    """

    reward: float | None = None  # None if a judge assigns the score
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
