"""Makes the base model from nothing: a Qwen3 of half a million random parameters, and a tokenizer for the game.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-0.6B}`.
"""

from pathlib import Path
from typing import Any

from game import MOVES
from rollout import SYSTEM

from art_cli import small_models


def make_tokenizer() -> Any:
    """A move is one token, and so is each cell of a board."""
    return small_models.make_tokenizer([SYSTEM, *MOVES])


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer(), hidden=96, positions=128)
