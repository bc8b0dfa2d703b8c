"""Makes the base model from nothing: a Qwen3 of 700,000 random parameters that knows the mailbox's words.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-4B}`.
"""

from pathlib import Path
from typing import Any

from inbox import DAYS, PEOPLE, PLACES, PROJECTS, QUESTIONS
from rollout import SYSTEM, TOOLS

from art_cli import small_models

WORDS = [SYSTEM, *PEOPLE, *PROJECTS, *PLACES, *DAYS, *QUESTIONS.values(), "From Subject We meet in on with nothing"]


def make_tokenizer() -> Any:
    return small_models.make_tokenizer(WORDS, tools=TOOLS, splits_spaces=True)


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer(), positions=1024, layers=3)
