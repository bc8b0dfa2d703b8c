"""Outcome: what a rollout returns, and the bound on its numbers.

It uses the standard library only, because the Python that runs rollouts may have nothing else (rollouts/bootstrap.py).
"""

from dataclasses import dataclass, field
from typing import Any

MAX_NUMBER = 1e30  # largest absolute reward or metric; the sum of a million squares of it is far from overflowing


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a rollout that has more than a reward.

    Example: Outcome(reward=1.0, metrics={"moves": 5, "won": 1}, metadata={"final_board": "XOX..."})
    """

    reward: float | None = None  # or None if a judge will score it
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
