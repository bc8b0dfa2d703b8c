"""Shared code for environments with a server: a question asked once, a connection per attempt, the calls of tools."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from art_cli.rollouts.environments import EnvironmentFault, Json, Settings, refused
from art_cli.runtime.errors import describe, first_error

if TYPE_CHECKING:
    from art_cli.runs.outcome import Outcome

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Connection = TypeVar("Connection")


def ask_once(settings: Settings, question: Coroutine[Any, Any, Answer]) -> Answer:
    """Returns the server's answer, while this thread waits. Raises UsageError if it failed."""
    try:
        with ThreadPoolExecutor(1) as thread:  # this thread already runs an event loop
            return thread.submit(asyncio.run, question).result()
    except Exception as error:  # the boundary to the server and its package
        raise refused(settings, first_error(error)) from error


async def play_connected(
    name: str,
    connection: AbstractAsyncContextManager[Connection],
    converse: Callable[[Connection], Awaitable["Outcome"]],
) -> "Outcome":
    """Returns the outcome of `converse`, despite errors of closing. Raises EnvironmentFault for a lost connection."""
    failure: Exception | None = None
    outcome: Outcome | None = None
    try:
        async with connection as connected:
            try:
                outcome = await converse(connected)
            except Exception as error:  # raised below, because the connection might wrap it into a group
                failure = error
    except Exception as error:  # the boundary to the server
        if failure is None and outcome is None:
            raise EnvironmentFault(f"{name}: {describe(first_error(error))}") from error
        log.debug("%s: closing the connection: %s", name, describe(first_error(error)))
    if failure is not None:
        raise failure
    assert outcome is not None, "the conversation ended"
    return outcome


def read_call(call: Any, known: Collection[str]) -> Json | str:
    """Returns the arguments of a tool call in OpenAI's format, or what is wrong with the call, for the policy."""
    if call.function.name not in known:
        return f"unknown tool {call.function.name!r}; known: {', '.join(sorted(known)) or 'none'}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()  # as a server could be sent them
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"
    return arguments if isinstance(arguments, dict) else "the arguments are not a JSON object"
