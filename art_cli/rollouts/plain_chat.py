"""Spares chat calls of the openai client more than half their processor time, with the same bytes on the wire.

Before it sends a call, the client walks through each message once for every kind of message that there may be, and
through the other arguments as well. The walk writes out pydantic objects, and changes nothing in plain JSON data. After
the reply it makes each object of it in Python. A call whose arguments are plain JSON data goes through the client's
`post` here, as calls do for which the client has no method of its own: the same headers, retries and errors, but no
walk, and pydantic's own validator makes the objects. Other calls, such as streams and those with headers of their own,
go through the client's method; there a copy of plain messages travels as the call's `extra_body`, which the client puts
in their place. Where another library has replaced the client's method, to trace calls or to patch them, everything
stays as it is, so that the library sees the messages.

Standard library only, because the Python that runs rollouts may have nothing else (bootstrap.py).
"""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

Json = dict[str, Any]

WALKED = ("messages", "tools")  # arguments of a chat call that the client walks through
FIRST = ("messages", "model")  # how the client's bodies begin; their other fields follow by name
# Arguments that are fields of the body. A call with any other one goes through the client's method.
FIELDS = frozenset(
    {
        *(*FIRST, "tools", "tool_choice", "parallel_tool_calls", "response_format", "temperature", "top_p", "n"),
        *("max_tokens", "max_completion_tokens", "stop", "seed", "logprobs", "top_logprobs", "user"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "extra_body"),
    }
)
MAX_DEPTH = 16  # nesting of data that is looked at
_LEAVES = frozenset({str, int, float, bool, type(None)})


class _NotPlainError(Exception):
    """Some of the data is no plain JSON data."""


def spare_the_walk(client: "openai.AsyncOpenAI | openai.OpenAI", package: ModuleType) -> None:
    """From now on `client.chat.completions.create` sends plain JSON data as it is.

    `package` is the openai package that the client is of.
    """
    completions: Any = client.chat.completions
    if _is_of(package, completions.create):
        completions.create = _sparing(completions.create, client)


def _sparing(create: Callable[..., Any], client: Any) -> Callable[..., Any]:
    kind = import_module("openai.types.chat").ChatCompletion
    is_async = inspect.iscoroutinefunction(client.post)

    async def ask(body: Json) -> Any:
        return _read(kind, await client.post("/chat/completions", cast_to=object, body=body))

    @functools.wraps(create)
    def sparing(*arguments: Any, **given: Any) -> Any:
        if not arguments and (body := _body_of(given)) is not None:
            if is_async:
                return ask(body)
            return _read(kind, client.post("/chat/completions", cast_to=object, body=body))
        beside = given.get("extra_body")
        if beside is not None and type(beside) is not dict:
            return create(*arguments, **given)
        plain = _plain_of(given)
        body = plain | (beside or {})  # the caller's own body wins, as it does in the client
        return create(*arguments, **{**given, **dict.fromkeys(plain, ()), "extra_body": body or None})

    return sparing


def _body_of(given: Json) -> Json | None:
    """The body of a call with these arguments, copied; None: it is not for us to write."""
    if not given.keys() <= FIELDS or type(given.get("messages")) is not list or type(given.get("model")) is not str:
        return None
    names = [*FIRST, *sorted(given.keys() - {*FIRST, "extra_body"})]
    try:
        return {name: plain_copy(given[name]) for name in names} | (plain_copy(given.get("extra_body")) or {})
    except (_NotPlainError, TypeError):
        return None


def _read(kind: Any, data: Any) -> Any:
    """The reply as an object of the client's, as its own method makes it."""
    try:
        return kind.model_validate(data)
    except ValueError:  # pydantic's errors are ValueErrors
        return kind.construct(**data) if isinstance(data, dict) else data


def _plain_of(given: Json) -> Json:
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
