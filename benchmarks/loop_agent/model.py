"""A Qwen3 of 24M random parameters and a vocabulary of 8,192 words, each of which is one token behind a space."""

import random
from pathlib import Path
from typing import Any

from art_cli import small_models

NUM_TOKENS = 8192
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words() -> list[str]:
    """Different words of five letters, the same each time."""
    draw = random.Random(0)
    found = {"".join(draw.choices(LETTERS, k=5)): None for _ in range(9000)}
    return list(found)


def make_tokenizer() -> Any:
    # More words than fit: the merges that make them are tokens too. The most frequent are whole, so some are often.
    text = " " + " ".join(word for number, word in enumerate(words()) for _ in range(1 + 2 * (number < 1500)))
    return small_models.make_tokenizer([text], most_tokens=NUM_TOKENS)


def build(directory: Path) -> None:
    small_models.build(directory, make_tokenizer(), hidden=384, layers=11, heads=6, positions=2048)
