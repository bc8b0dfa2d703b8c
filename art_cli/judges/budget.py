"""How much may still be spent. A call asks first, with an estimate; what it really took is settled afterwards.

Calls in flight count with their estimates, so that many at once cannot run past the limit together. A call that would
fit but for those waits for them: they mostly take less than was set aside.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from art_cli.errors import JudgeStopped
from art_cli.judges.cache import Spent, Usage


class BudgetSpent(JudgeStopped):
    """The next call could exceed the budget."""


class Budget:
    """`usd` and `tokens` None: no limit. `spent` is what the job took before."""

    def __init__(self, usd: float | None, tokens: int | None, spent: Spent) -> None:
        self.usd, self.tokens = usd, tokens
        self.spent = spent
        self._held = Spent(0.0, 0)
        self._settled = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, estimate: Spent) -> AsyncIterator[None]:
        """Sets an estimate aside while a call is under way. Raises BudgetSpent where it can never fit."""
        async with self._settled:
            self._check(estimate)
            while not self._fits(estimate.usd + self._held.usd, estimate.tokens + self._held.tokens):
                await self._settled.wait()  # as long as a call in flight takes, which has a deadline
                self._check(estimate)
            self._held = Spent(self._held.usd + estimate.usd, self._held.tokens + estimate.tokens)
        try:
            yield
        finally:
            self._held = Spent(self._held.usd - estimate.usd, self._held.tokens - estimate.tokens)
            async with self._settled:
                self._settled.notify_all()

    def settle(self, usage: Usage) -> None:
        """What a call took; to be called while it is still held."""
        self.spent = Spent(self.spent.usd + (usage.cost_usd or 0.0), self.spent.tokens + usage.tokens)

    def _fits(self, usd: float, tokens: int) -> bool:
        is_cheap = self.usd is None or self.spent.usd + usd <= self.usd
        return is_cheap and (self.tokens is None or self.spent.tokens + tokens <= self.tokens)

    def _check(self, estimate: Spent) -> None:
        if self._fits(*estimate):
            return
        if self.usd is not None and self.spent.usd + estimate.usd > self.usd:
            spent = f"${self.spent.usd:.4f} of judge.budget_usd {self.usd:g}"
        else:
            spent = f"{self.spent.tokens:,} of judge.budget_tokens {self.tokens:,}"
        raise BudgetSpent(
            f"{spent} spent, and the next call could exceed it; what is scored is saved, raise it to go on"
        )
