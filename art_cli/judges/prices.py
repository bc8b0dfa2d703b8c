"""What a model costs: litellm's packaged price table, read as a file, since importing litellm takes seconds.

No network. A model that is not in the table has no price: its cost is unknown, which is not the same as nothing.
"""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.schema import JudgeModelConfig

_TABLE = "model_prices_and_context_window_backup.json"


class Price(NamedTuple):
    """US dollars per token. Example, openai/o3: Price(prompt=2e-06, completion=8e-06, cached=5e-07)"""

    prompt: float
    completion: float
    cached: float  # of prompt tokens that the provider had in its own cache

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        fresh = prompt_tokens - cached_tokens
        return self.prompt * fresh + self.cached * cached_tokens + self.completion * completion_tokens


def find_price(member: JudgeModelConfig) -> Price | None:
    """The configured price, or the table's; None: unknown."""
    if member.price is not None:
        prompt, completion = member.price.input / 1e6, member.price.output / 1e6
        return Price(prompt, completion, prompt)
    for name in (member.model, member.model.partition("/")[2]):
        row = _table().get(name)
        if row and row.get("input_cost_per_token") is not None and row.get("output_cost_per_token") is not None:
            prompt = float(row["input_cost_per_token"])
            cached = row.get("cache_read_input_token_cost")
            return Price(prompt, float(row["output_cost_per_token"]), prompt if cached is None else float(cached))
    return None


def takes_schema(model: str) -> bool | None:
    """Whether the table says that the model holds its answer to a JSON schema; None: it does not say."""
    row = _table().get(model) or _table().get(model.partition("/")[2]) or {}
    known = row.get("supports_response_schema")
    return None if known is None else bool(known)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    spec = importlib.util.find_spec("litellm")  # finds the package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _TABLE
        if path.exists():
            table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            return table
    return {}
