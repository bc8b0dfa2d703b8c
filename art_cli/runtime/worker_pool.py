"""WorkerPool: a limited number of concurrent calls in daemon threads, each with a deadline.

Python cannot stop a thread. After the deadline a call is abandoned: its caller gets an error, and its thread continues.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from art_cli.runtime.threads import call_in_thread

Result = TypeVar("Result")


class Crowded(Exception):
    """A call had to wait too long for a thread."""


class Overran(Exception):
    """A call took too long and was abandoned."""


class WorkerPool:
    """Runs up to `size` calls concurrently in FIFO order, plus up to `max_abandoned` abandoned calls. Serves one event
    loop.

    A call is abandoned after `run_s`, or when its caller is cancelled. Its slot is freed immediately. If
    `max_abandoned` other calls are still running, the slot is freed when any of them returns. Abandoned calls still
    compete for the interpreter, so servers allow fewer of them.
    """

    def __init__(self, *, size: int, wait_s: float, run_s: float, max_abandoned: int = 8) -> None:
        self._turns, self._wait_s, self._run_s = asyncio.Semaphore(size), wait_s, run_s
        self._max_abandoned = max_abandoned
        self._num_abandoned = 0  # abandoned calls still running

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Returns `function(*arguments)`. Raises Crowded, Overran, or the function's error."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Crowded from None
        call = asyncio.create_task(call_in_thread(function, *arguments))
        try:
            await asyncio.wait((call,), timeout=self._run_s)
            if not call.done():
                raise Overran
            return call.result()
        finally:
            if call.done():
                self._turns.release()
            else:
                self._abandon(call)

    def _abandon(self, call: asyncio.Task[Any]) -> None:
        self._num_abandoned += 1
        if self._num_abandoned <= self._max_abandoned:
            self._turns.release()
        call.add_done_callback(self._on_return)

    def _on_return(self, call: asyncio.Task[Any]) -> None:
        if not call.cancelled():
            call.exception()  # marks the error as retrieved
        if self._num_abandoned > self._max_abandoned:
            self._turns.release()
        self._num_abandoned -= 1
