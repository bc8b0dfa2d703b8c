"""The day on which a provider shuts a model down, by litellm's packaged table. Makes no call.

The table has a day for about a fifth of its models. A model without a day may be shut down at any time all the same.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel

from art_cli.config.schema import (
    BlendJudgeConfig,
    JudgeModelConfig,
    PromptLearnerConfig,
    RulerJudgeConfig,
)
from art_cli.config.sections.engine_config import HostedEngineConfig
from art_cli.judges.blend import named_judges
from art_cli.judges.costs import model_table
from art_cli.judges.providers.http import OPENAI, openai_base

WARN_DAYS = 60  # days before a retirement from which it is reported
PROVIDERS = ("api.openai.com", "api.anthropic.com")  # endpoints whose models the table has by their own names

_SNAPSHOT = re.compile(r"-(\d{4}-\d\d-\d\d|\d{8})")


class Retirement(NamedTuple):
    """Example: Retirement("openai/o3", date(2026, 12, 11), 14), as text "openai/o3 is shut down on 2026-12-11"."""

    model: str
    day: date
    days_left: int  # days from today; 0 or less if the model is shut down

    @property
    def is_over(self) -> bool:
        return self.days_left <= 0

    def __str__(self) -> str:
        return f"{self.model} {'was' if self.is_over else 'is'} shut down on {self.day}"


def retirement_day(model: str) -> date | None:
    """Returns the day on which a model is shut down, or None if the table has none.

    A name without a day, such as `o3`, ends with the last of its dated snapshots, if each snapshot has a day.
    """
    table = model_table()
    for name in (model, model.partition("/")[2]):
        if name in table:
            days = [_day(table[name])]
            if days == [None]:
                dated = (
                    row for each, row in table.items() if each.startswith(name) and _SNAPSHOT.fullmatch(each, len(name))
                )
                days = [_day(row) for row in dated]
            return None if None in days else max((day for day in days if day), default=None)
    return None


def _day(row: Mapping[str, object]) -> date | None:
    try:
        return date.fromisoformat(str(row.get("deprecation_date")))
    except ValueError:
        return None


def hosted_models(part: object) -> Iterator[str]:
    """Yields the name of each model in a configuration, or in a part of it, that a provider hosts.

    These are judges, models that write prompts, and policies at a paid endpoint.
    """
    if isinstance(part, RulerJudgeConfig) and part.panel:
        yield from hosted_models(part.panel)
    elif isinstance(part, JudgeModelConfig):
        is_elsewhere = part.base_url is not None or (not part.needs_litellm and openai_base() != OPENAI)
        yield from () if part.is_rule or is_elsewhere else (part.model,)
    elif isinstance(part, BlendJudgeConfig):
        yield from hosted_models(named_judges(part))
    elif isinstance(part, PromptLearnerConfig):
        yield from hosted_models(part.member)
    elif isinstance(part, HostedEngineConfig):
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
    """Returns the models that are shut down today, or within WARN_DAYS, the first day first."""
    today = today or _today()
    days = {model: day for model in models if (day := retirement_day(model)) is not None}
    found = [Retirement(model, day, (day - today).days) for model, day in days.items()]
    return sorted((each for each in found if each.days_left <= WARN_DAYS), key=lambda each: each.day)


def _today() -> date:
    return datetime.now(UTC).date()
