"""Resolves `${...}` in a composed configuration, with bounds on the size of the result.

Interpolations can double each other (`a: ${b}${b}`, `b: ${c}${c}`, ...), and a section can hold itself. The
results are counted while OmegaConf resolves them, so that neither takes more than a moment.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from omegaconf import Container, DictConfig, ListConfig, Node
from omegaconf.errors import InterpolationResolutionError

MAX_RESOLVED = 10_000  # largest number of values that interpolations resolve to, copied sections included
MAX_CHARACTERS = 1024 * 1024  # largest total length of the texts that interpolations resolve to


class InterpolationTooLarge(InterpolationResolutionError):
    """Interpolations exceed the bounds, or refer to themselves."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Inside, OmegaConf raises InterpolationTooLarge instead of resolving for ever.

    OmegaConf has no hook for this. Every interpolation passes through `Container.resolve_parse_tree`, so that method is
    the place to count. Remove it when OmegaConf bounds or caches what it resolves.
    """
    resolve = Container.resolve_parse_tree
    num_values = num_characters = 0

    def counted(self: Container, *arguments: Any, **knobs: Any) -> Any:
        nonlocal num_values, num_characters
        num_values += 1
        _check(num_values, num_characters)
        found = resolve(self, *arguments, **knobs)
        for value in _values(found):
            num_values += 1
            num_characters += len(value) if isinstance(value, str) else 1
            _check(num_values, num_characters)
        return found

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _check(num_values: int, num_characters: int) -> None:
    if num_values > MAX_RESOLVED or num_characters > MAX_CHARACTERS:
        raise InterpolationTooLarge("these interpolations come to too much, or lead back to themselves")


def _values(found: Any) -> Iterator[Any]:
    """Every value in the result of an interpolation, the result included; nested interpolations are not resolved."""
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, DictConfig | ListConfig):
            content = value._content
            waiting += content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
        yield value._value() if isinstance(value, Node) and not isinstance(value, Container) else value
