"""Outcome: what a rollout says of itself, and the bound on its numbers.

Standard library only, since the Python that runs rollouts may have nothing else (rollouts/start.py).
"""

from dataclasses import dataclass, field
from typing import Any

MAX_NUMBER = 1e30  # largest absolute reward or metric: sums of squares of a million of them are far from overflowing


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rollout says of itself, when it is more than a number.

    Example: Outcome(reward=1.0, metrics={"moves": 5, "won": 1}, metadata={"final_board": "XOX..."})
    """

    reward: float | None = None  # None: a judge will score it
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
