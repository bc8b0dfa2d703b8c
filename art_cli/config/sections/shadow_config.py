"""The `shadow` section: judges whose scores are recorded beside the trained reward and never trained on."""

from typing import Annotated

from pydantic import Field

from art_cli.config.sections.base_config import Float, Seconds, Section
from art_cli.config.sections.judge_config import NamedJudgeConfig

ShadowName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=40)]


class ShadowConfig(Section):
    """One shadow judge."""

    judge: NamedJudgeConfig
    """The judge, written like a `judge` section: {entry: "judge.py:short"}, {name: ruler, model: openai/o3}, or
    {name: rollout} for the reward that the rollout returned."""
    share: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """The share of groups that it scores, selected by a hash of the group's id."""
    timeout_s: Seconds = 60.0
    """The longest time in seconds that a group waits for it. A judge that fails or takes longer three times in a row is
    not asked again until the next start."""
