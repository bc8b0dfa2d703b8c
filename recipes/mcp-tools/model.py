"""Makes the base model from nothing: a Qwen3 of about a million random parameters, and a tokenizer for the order desk.

A base from a hub needs none of this: `model: {base: Qwen/Qwen3-1.7B}`.
"""

from pathlib import Path
from typing import Any

from demos import FUNCTIONS
from desk import ITEMS, QUESTIONS, STATES

from art_cli import small_models

WORDS = [*QUESTIONS, *ITEMS, *STATES, "none", " ".join(tool["function"]["name"] for tool in FUNCTIONS)]


def make_tokenizer() -> Any:
    """A call is two tokens and those of its number, a digit each; an answer is a word or three digits."""
    return small_models.make_tokenizer(WORDS, tools=FUNCTIONS)


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer())
