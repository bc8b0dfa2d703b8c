"""Makes the base model from nothing: a Qwen3 of 700,000 random parameters that knows the puzzle's words.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-4B}`.
"""

from pathlib import Path
from typing import Any

from puzzle import PEOPLE, ROOMS, TOOLS
from rollout import SYSTEM

from art_cli import small_models

NAMES = [*PEOPLE, *ROOMS, *TOOLS]
WORDS = [
    SYSTEM,
    "It was not at in the",
    "At 1 Ada was",
    "The lay",
    " and were together",
    *(f"{name} {name}" for name in NAMES),
]


def make_tokenizer() -> Any:
    return small_models.make_tokenizer(WORDS)


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer(), layers=3, rope_theta=100.0)  # a small one: texts are short
