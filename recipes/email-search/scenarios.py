"""The mailboxes: a seed and a size each. Those for evaluation are fixed, and none of them is trained on."""

from collections.abc import Iterator
from typing import Any

from inbox import Size

SMALL = Size(emails=6, names=8, facts=("place", "day"))
LARGE = Size(emails=300, names=20, facts=("place", "day", "guest", "price"), asides=4)


def train() -> Iterator[dict[str, Any]]:
    return _mailboxes("train", 4000, SMALL)


def evaluation() -> Iterator[dict[str, Any]]:
    return _mailboxes("eval", 200, SMALL)


def train_large() -> Iterator[dict[str, Any]]:
    return _mailboxes("train-large", 4000, LARGE)


def evaluation_large() -> Iterator[dict[str, Any]]:
    return _mailboxes("eval-large", 200, LARGE)


def _mailboxes(name: str, num: int, size: Size) -> Iterator[dict[str, Any]]:
    for number in range(num):
        yield {"id": f"{name}-{number}", "seed": f"{name}-{number}", "size": size._asdict()}
