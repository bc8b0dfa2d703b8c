"""The games: each is the seed of a deal. Those for evaluation are fixed, and none of them is trained on."""

from collections.abc import Iterator
from typing import Any


def train() -> Iterator[dict[str, Any]]:
    return _games("train", 4000)


def evaluation() -> Iterator[dict[str, Any]]:
    return _games("eval", 400)


def _games(name: str, num_games: int) -> Iterator[dict[str, Any]]:
    for number in range(num_games):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}"}
