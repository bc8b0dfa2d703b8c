"""Stopping: the end of a server. A signal refuses new requests, and those in flight end or run out of time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from art_cli.runtime.errors import first_of_group

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 60.0  # longest wait for cancelled work to end; a vLLM server stopped during its start takes 20 s


class Stopping:
    """The end of one server. `refuse` refuses new requests; those in flight, `num_running` of them, have `drain_s`."""

    def __init__(self, drain_s: float, *, refuse: Callable[[], None], num_running: Callable[[], int]) -> None:
        self._drain_s, self._refuse, self._num_running = drain_s, refuse, num_running
        self._stop, self._stop_at_once = asyncio.Event(), asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Refuses new requests. A second call ends the wait for those in flight."""
        if self._stop.is_set():
            self._stop_at_once.set()
            return
        self._stop.set()
        self._refuse()
        log.info("stopping: %d requests are ended first, at most %g s", self._num_running(), self._drain_s)

    async def ends_before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Returns whether `work` ended by itself before `stop` was called. Raises what `work` raises."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                with first_of_group():
                    task.result()
            return task.done()
        finally:
            stop.cancel()
            await cancel(task)

    async def drain(self, work: Coroutine[Any, Any, None]) -> None:
        """Returns when `work`, which waits for those in flight, is done, the time is up, or `stop` was called again."""
        task, at_once = asyncio.create_task(work), asyncio.create_task(self._stop_at_once.wait())
        await asyncio.wait((task, at_once), timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.warning("stopped with %d requests unfinished", self._num_running())
        await cancel(task, at_once)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks and waits for their end, up to a deadline."""
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S) if tasks else (tasks, ())
    for task in pending:
        log.warning("cancelled, and not ended within %g s: %s", CANCEL_TIMEOUT_S, task.get_coro())
