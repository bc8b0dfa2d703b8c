"""How much may still be spent. A call asks first, with an estimate; what it really took is settled afterwards.

Calls in flight count with their estimates, so that many at once cannot run past the limit together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from art_cli.errors import JudgeStopped
from art_cli.judges.cache import Spent, Usage


class BudgetSpent(JudgeStopped):
    """The next call could exceed the budget."""


class Budget:
    def __init__(self, usd: float | None, tokens: int | None, spent: Spent) -> None:
        self.usd, self.tokens = usd, tokens
        self.spent_usd, self.spent_tokens = spent.usd, float(spent.tokens)
        self._held_usd, self._held_tokens = 0.0, 0.0

    @contextmanager
    def hold(self, *, usd: float, tokens: float) -> Iterator[None]:
        """Sets an estimate aside while a call is under way. Raises BudgetSpent where it does not fit."""
        if self.usd is not None and self.spent_usd + self._held_usd + usd > self.usd:
            raise BudgetSpent(
                f"budget: ${self.spent_usd:.4f} of judge.budget_usd {self.usd:g} spent, and the next call could exceed "
                "it; everything so far is saved: raise it and run the same command again"
            )
        if self.tokens is not None and self.spent_tokens + self._held_tokens + tokens > self.tokens:
            raise BudgetSpent(
                f"budget: {self.spent_tokens:.0f} of judge.budget_tokens {self.tokens} spent, and the next call could "
                "exceed it; everything so far is saved: raise it and run the same command again"
            )
        self._held_usd += usd
        self._held_tokens += tokens
        try:
            yield
        finally:
            self._held_usd -= usd
            self._held_tokens -= tokens

    def settle(self, usage: Usage) -> None:
        self.spent_usd += usage.cost_usd or 0.0
        self.spent_tokens += usage.tokens
