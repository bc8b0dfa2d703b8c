"""Shutdown dates of hosted models, from litellm's packaged table, which has them for about a fifth of its models."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from art_cli.config.schema import BlendJudgeConfig, JudgeModelConfig, RulerJudgeConfig
from art_cli.judges.blend import named_judges
from art_cli.judges.costs import model_table
from art_cli.judges.providers.http import OPENAI, openai_base

WARN_DAYS = 60  # first warning before the shutdown, in days
PROVIDERS = ("api.openai.com", "api.anthropic.com")  # hosts with models listed under plain names

_SNAPSHOT = re.compile(r"-(\d{4}-\d\d-\d\d|\d{8})")


class Retirement(NamedTuple):
    """Example: Retirement("openai/o3", date(2026, 12, 11), False) is "openai/o3 is shut down on 2026-12-11"."""

    model: str
    day: date
    is_over: bool

    def __str__(self) -> str:
        return f"{self.model} {'was' if self.is_over else 'is'} shut down on {self.day}"


def retirement_day(model: str) -> date | None:
    """Returns the shutdown date, if listed; for a name without a date, such as `o3`, the latest of its snapshots."""
    table = model_table()
    name = model if model in table else model.partition("/")[2]
    if name not in table or (day := _day(table[name])) is not None:
        return day if name in table else None
    snapshots = [each for each in table if each.startswith(name) and _SNAPSHOT.fullmatch(each, len(name))]
    days = [_day(table[each]) for each in snapshots]
    return None if None in days else max((day for day in days if day), default=None)


def _day(row: Mapping[str, object]) -> date | None:
    try:
        return date.fromisoformat(str(row.get("deprecation_date")))
    except ValueError:
        return None


def hosted_models(part: Any) -> Iterator[str]:
    """Yields a configuration's hosted models: judges, models that write prompts, and policies at paid endpoints."""
    if isinstance(part, RulerJudgeConfig) and part.panel:
        yield from hosted_models(part.panel)
    elif isinstance(part, JudgeModelConfig):
        is_elsewhere = part.base_url is not None or (not part.needs_litellm and openai_base() != OPENAI)
        yield from () if part.is_rule or is_elsewhere else (part.model,)
    elif isinstance(part, BlendJudgeConfig):
        yield from hosted_models(named_judges(part))
    elif member := getattr(part, "member", None):  # a learner that asks a model for prompts
        yield from hosted_models(member)
    elif not getattr(part, "can_train", True):  # an engine at an endpoint
        yield from (part.model,) if urlsplit(part.base_url).hostname in PROVIDERS else ()
    elif isinstance(part, BaseModel):
        for name in type(part).model_fields:
            yield from hosted_models(getattr(part, name))
    elif isinstance(part, Mapping):
        yield from hosted_models(list(part.values()))
    elif isinstance(part, list):
        for each in part:
            yield from hosted_models(each)


def find_retiring(models: Iterable[str], *, today: date | None = None) -> list[Retirement]:
    """Returns the models that shut down within WARN_DAYS (or already have), earliest first."""
    today = today or datetime.now(UTC).date()
    days = sorted((day, model) for model in models if (day := retirement_day(model)) is not None)
    return [Retirement(model, day, day <= today) for day, model in days if (day - today).days <= WARN_DAYS]
