"""The games: the seed of the tiles that come, the tile that wins, and in how many moves.

Those for evaluation are fixed, and none of them is trained on. The long ones are for a real model.
"""

from collections.abc import Iterator
from typing import Any


def train() -> Iterator[dict[str, Any]]:
    return _games("train", 2000, target=16, moves=12)


def evaluation() -> Iterator[dict[str, Any]]:
    return _games("eval", 200, target=16, moves=12)


def train_long() -> Iterator[dict[str, Any]]:
    return _games("train", 2000, target=128, moves=100)


def evaluation_long() -> Iterator[dict[str, Any]]:
    return _games("eval", 50, target=128, moves=100)


def _games(name: str, num_games: int, **game: int) -> Iterator[dict[str, Any]]:
    for number in range(num_games):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", **game}
