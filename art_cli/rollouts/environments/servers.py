"""Shared code for environments with a server: a question asked once, and a connection per attempt."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from art_cli.rollouts.environments import EnvironmentFault, Settings, refused
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
    """Returns the outcome of `converse`. Raises its exceptions, and EnvironmentFault if the connection failed.

    Errors while closing the connection are ignored once the outcome is known.
    """
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
