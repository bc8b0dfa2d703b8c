"""The games: the seed of a deal, and how many clues there are.

Those for evaluation are fixed, and have other seeds than those that are trained on. The long ones are for a real model.
"""

from collections.abc import Iterator
from typing import Any


def train() -> Iterator[dict[str, Any]]:
    return _games("train", 4000, clues=1)


def evaluation() -> Iterator[dict[str, Any]]:
    return _games("eval", 400, clues=1)


def train_long() -> Iterator[dict[str, Any]]:
    return _games("train", 4000, clues=3)


def evaluation_long() -> Iterator[dict[str, Any]]:
    return _games("eval", 400, clues=3)


def _games(name: str, num_games: int, *, clues: int) -> Iterator[dict[str, Any]]:
    for number in range(num_games):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", "clues": clues}
