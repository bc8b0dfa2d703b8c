"""Spares chat calls of the openai client half their processor time, with the same bytes on the wire.

Before it sends a call, the client walks through each message once for every kind of message that there may be. The walk
writes out pydantic objects, and changes nothing in messages of plain JSON data. Here a copy of such messages travels as
the call's `extra_body`, which the client puts in their place. Where another library has replaced the client's method,
to trace calls or to patch them, everything stays as it is, so that the library sees the messages.

Standard library only, because the Python that runs rollouts may have nothing else (start.py).
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

WALKED = ("messages", "tools")  # arguments of a chat call that the client walks through
MAX_DEPTH = 16  # nesting of data that is looked at
_LEAVES = frozenset({str, int, float, bool, type(None)})


class _NotPlainError(Exception):
    """Some of the data is no plain JSON data."""


def spare_the_walk(client: "openai.AsyncOpenAI | openai.OpenAI", package: ModuleType) -> None:
    """From now on `client.chat.completions.create` sends messages and tools of plain JSON data as they are.

    `package` is the openai package that the client is of.
    """
    completions: Any = client.chat.completions
    if _is_of(package, completions.create):
        completions.create = _sparing(completions.create)


def _sparing(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def sparing(*arguments: Any, **given: Any) -> Any:
        beside = given.get("extra_body")
        if beside is not None and type(beside) is not dict:
            return create(*arguments, **given)
        plain = _plain_of(given)
        body = plain | (beside or {})  # the caller's own body wins, as it does in the client
        return create(*arguments, **{**given, **dict.fromkeys(plain, ()), "extra_body": body or None})

    return sparing


def _plain_of(given: dict[str, Any]) -> dict[str, Any]:
    """Copies of the arguments that are plain."""
    found = {}
    for name in WALKED:
        if type(given.get(name)) is list:
            try:
                found[name] = plain_copy(given[name])
            except _NotPlainError:
                continue
    return found


def plain_copy(value: Any, depth: int = 0) -> Any:
    """A copy, which later changes of the caller's lists do not reach.

    Raises _NotPlainError: there is something else in it, or a subclass, which may mean something else.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if depth < MAX_DEPTH and kind is dict:
        return {name: plain_copy(child, depth + 1) for name, child in value.items()}
    if depth < MAX_DEPTH and kind is list:
        return [plain_copy(child, depth + 1) for child in value]
    raise _NotPlainError


def _is_of(package: ModuleType, method: Any) -> bool:
    """Whether the method is the package's own, with no wrapper of another library around it."""
    function = getattr(method, "__func__", None)
    home = Path(inspect.getfile(package)).parent
    return isinstance(function, FunctionType) and Path(function.__code__.co_filename).is_relative_to(home)
