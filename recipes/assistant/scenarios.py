"""The requests: a seed each. Those for evaluation have people and products that no training request has."""

from collections.abc import Iterator
from typing import Any


def train() -> Iterator[dict[str, Any]]:
    return _requests("train", 2000)


def evaluation() -> Iterator[dict[str, Any]]:
    return _requests("held-out", 64)


def _requests(name: str, num: int) -> Iterator[dict[str, Any]]:
    for number in range(num):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", "is_new": name == "held-out"}
