"""Makes the base model from nothing: a Qwen3 of about a million random parameters, and a tokenizer for the game.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-0.6B}`.
"""

from pathlib import Path
from typing import Any

from game import CLUES, MEANINGS
from rollout import GUESSER, SPYMASTER

from art_cli import small_models


def make_tokenizer() -> Any:
    """Each word is one token, the same where it is shown and where it is said; it has no word's kind or colour."""
    return small_models.make_tokenizer([SPYMASTER, GUESSER, *MEANINGS, *CLUES, "ours:", "neutral:", "assassin:"])


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer())
