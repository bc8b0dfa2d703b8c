"""Makes the base model from nothing: a Qwen3 of about a million random parameters, and a tokenizer for the game.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-0.6B}`.
"""

from pathlib import Path
from typing import Any

from rollout import SYSTEM

from art_cli import small_models


def make_tokenizer() -> Any:
    """The words of the system prompt are one token each, all other text is bytes. A move is one token."""
    return small_models.make_tokenizer([SYSTEM])


def build(directory: Path) -> None:
    # A game is 200 tokens, and what matters is which board is the last one. A small rope_theta helps to tell.
    small_models.build(directory, make_tokenizer(), rope_theta=100.0)
