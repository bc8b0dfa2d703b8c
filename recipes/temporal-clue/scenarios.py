"""The puzzles: a seed and a size each. Those for evaluation are fixed, and none of them is trained on."""

from collections.abc import Iterator
from typing import Any

from puzzle import Size

SMALL = Size(people=3, hours=3, rooms=3, tools=3)
LARGE = Size(people=5, hours=5, rooms=5, tools=5)


def train() -> Iterator[dict[str, Any]]:
    return _puzzles("train", 4000, SMALL)


def evaluation() -> Iterator[dict[str, Any]]:
    return _puzzles("eval", 400, SMALL)


def train_large() -> Iterator[dict[str, Any]]:
    return _puzzles("train-large", 4000, LARGE)


def evaluation_large() -> Iterator[dict[str, Any]]:
    return _puzzles("eval-large", 200, LARGE)


def _puzzles(name: str, num: int, size: Size) -> Iterator[dict[str, Any]]:
    for number in range(num):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", "size": size._asdict()}
