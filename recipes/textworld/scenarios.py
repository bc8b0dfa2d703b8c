"""The games: a seed and a size each. Those for evaluation have other seeds, which decide the rooms and the way to win,
and food and things that no training game has."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from game import Size

EASY = Size(rooms=1, objects=2, commands=2)
SMALL = Size(rooms=1, objects=4, commands=2)
LARGE = Size(rooms=4, objects=8, commands=6)
HELD_OUT = 10_000  # the first seed of a game for evaluation


def train() -> Iterator[dict[str, Any]]:
    return _games("train", 40, SMALL, EASY)


def evaluation() -> Iterator[dict[str, Any]]:
    return _games("held-out", 32, SMALL, EASY)


def train_large() -> Iterator[dict[str, Any]]:
    return _games("train", 400, LARGE)


def evaluation_large() -> Iterator[dict[str, Any]]:
    return _games("held-out", 100, LARGE)


def _games(name: str, num: int, *sizes: Size) -> Iterator[dict[str, Any]]:
    """Yields games of these sizes in turn."""
    is_held_out = name == "held-out"
    for number, size in zip(range(num), cycle(sizes), strict=False):
        seed = number + HELD_OUT if is_held_out else number
        yield {"id": f"{name}-{number}", "seed": seed, "size": size._asdict(), "is_held_out": is_held_out}
