"""The puzzles: a seed and a size each. Those for evaluation are fixed, and none with the same clues is trained on."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from puzzle import Size, make_puzzle

SMALL = Size(people=3, hours=2, rooms=2, tools=2)
LARGE = Size(people=5, hours=5, rooms=5, tools=5)


def train() -> Iterator[dict[str, Any]]:
    return (scenario for scenario in _puzzles("train", 4000, SMALL) if not is_held_out(scenario["seed"]))


def evaluation() -> Iterator[dict[str, Any]]:
    return _puzzles("eval", 400, SMALL)


def train_large() -> Iterator[dict[str, Any]]:
    return _puzzles("train-large", 4000, LARGE)


def evaluation_large() -> Iterator[dict[str, Any]]:
    return _puzzles("eval-large", 200, LARGE)


def is_held_out(seed: str) -> bool:
    """Whether the small puzzle of a seed has the clues of one to evaluate on; there are only so many small puzzles."""
    return frozenset(make_puzzle(seed, SMALL).clues) in _held_out()


@cache
def _held_out() -> set[frozenset[Any]]:
    return {frozenset(make_puzzle(scenario["seed"], SMALL).clues) for scenario in evaluation()}


def _puzzles(name: str, num: int, size: Size) -> Iterator[dict[str, Any]]:
    for number in range(num):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", "size": size._asdict()}
