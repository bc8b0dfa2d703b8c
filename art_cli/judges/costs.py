"""Judging costs: call usage, model prices, estimates, and the budget of a job.

Prices are read directly from litellm's price table file, because importing litellm takes seconds. Makes no calls.
"""

import asyncio
import functools
import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from art_cli.config.schema import JudgeModelConfig, PriceConfig
from art_cli.config.sections.judge_config import DEFAULT_JUDGE, DEFAULT_PRICE
from art_cli.runtime.errors import JudgeStopped

_TABLE = "model_prices_and_context_window_backup.json"


class _Sum(msgspec.Struct, frozen=True):
    """Numbers added field by field. A sum with an unknown part (None) is unknown."""

    def __add__(self, other: Self) -> Self:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return type(self)(*(None if one is None or more is None else one + more for one, more in pairs))


class Usage(_Sum, frozen=True):
    """Usage of calls. `cost_usd` is None when any call's price is unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0
    latency_s: float = 0.0  # summed over calls, even concurrent calls

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Payer(Protocol):
    """A component that makes paid calls: a judge, or a learner that asks a model for prompts."""

    title: str
    spent_usd: float
    is_priced: bool

    @property
    def usage(self) -> Usage: ...


class CostEstimate(_Sum, frozen=True):
    """Estimated cost of the remaining calls. Cached votes are free. `usd` is None when a price is unknown.

    Completion tokens cover only the verdict, not the model's reasoning.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0


# --- prices -----------------------------------------------------------------------------------------------------------


class Price(NamedTuple):
    """US dollars per token. Example: Price(prompt=2e-06, completion=1e-05, cached=2e-07)"""

    prompt: float
    completion: float
    cached: float  # price of a prompt token in the provider's own cache

    def cost(self, prompt_tokens: float, completion_tokens: float, cached_tokens: float = 0) -> float:
        fresh = prompt_tokens - cached_tokens
        return self.prompt * fresh + self.cached * cached_tokens + self.completion * completion_tokens


def find_price(member: JudgeModelConfig) -> Price | None:
    """Returns the configured price, or the table price. None means unknown, not free."""
    if member.is_rule:
        return Price(0.0, 0.0, 0.0)
    if member.price is not None:
        return _as_price(member.price)
    for name in (member.model, member.model.partition("/")[2]):
        row = model_table().get(name)
        if row and row.get("input_cost_per_token") is not None and row.get("output_cost_per_token") is not None:
            prompt = float(row["input_cost_per_token"])
            cached = row.get("cache_read_input_token_cost")
            return Price(prompt, float(row["output_cost_per_token"]), prompt if cached is None else float(cached))
    return _as_price(DEFAULT_PRICE) if member.model == DEFAULT_JUDGE and member.base_url is None else None


def _as_price(price: PriceConfig) -> Price:
    return Price(price.input / 1e6, price.output / 1e6, price.input / 1e6)


def takes_schema(model: str) -> bool | None:
    """Returns whether the model supports JSON schemas for output, if the table lists the model."""
    row = model_table().get(model) or model_table().get(model.partition("/")[2]) or {}
    known = row.get("supports_response_schema")
    return None if known is None else bool(known)


@functools.cache
def model_table() -> dict[str, dict[str, Any]]:
    """Returns litellm's price table; empty if litellm is not installed."""
    spec = importlib.util.find_spec("litellm")  # does not import the package
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _TABLE
        if path.exists():
            table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return table
    return {}


# --- the budget -------------------------------------------------------------------------------------------------------


class Spent(NamedTuple):
    """A job's cost so far, or the maximum cost of a call."""

    usd: float
    tokens: int


class BudgetSpent(JudgeStopped):
    """The next call could exceed the budget."""


class Budget:
    """A job's spending limits in dollars and tokens. `spent` is the job's spending before this process.

    Calls in flight count with their estimates, so concurrent calls cannot exceed the limit together. If a call does not
    fit now, it waits for the calls in flight, because most calls cost less than their estimate.
    """

    def __init__(self, usd: float | None, tokens: int | None, spent: Spent) -> None:
        self.usd, self.tokens = usd, tokens
        self.spent = spent
        self._held = Spent(0.0, 0)
        self._released = asyncio.Condition()

    @property
    def is_limited(self) -> bool:
        return self.usd is not None or self.tokens is not None

    @asynccontextmanager
    async def hold(self, estimate: Spent) -> AsyncIterator[None]:
        """Reserves an estimate while a call is in flight. Raises BudgetSpent if the call can never fit."""
        async with self._released:
            self._check(estimate)
            while not self._fits(estimate.usd + self._held.usd, estimate.tokens + self._held.tokens):
                await self._released.wait()  # woken when a call ends; every call has a deadline
                self._check(estimate)
            self._held = Spent(self._held.usd + estimate.usd, self._held.tokens + estimate.tokens)
        try:
            yield
        finally:
            self._held = Spent(self._held.usd - estimate.usd, self._held.tokens - estimate.tokens)
            async with self._released:
                self._released.notify_all()

    def charge(self, usage: Usage) -> None:
        """Adds the actual cost of a call. Must be called while the call's estimate is still reserved."""
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
            f"{spent} spent, and the next call could exceed it; what is scored is saved, raise it to continue"
        )
