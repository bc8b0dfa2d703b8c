"""Stopping: how a server ends. A signal or `stop` refuses new requests, and those in flight end or run out of time."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from art_cli.runtime.errors import first_of_group
from art_cli.serving.admission import Admission

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 60.0  # longest wait for cancelled work to end; a vLLM server stopped during its start takes 20 s


class Stopping:
    """The end of one server. `drain_s`: longest wait for requests in flight."""

    def __init__(self, admission: Admission, drain_s: float) -> None:
        self._admission, self._drain_s = admission, drain_s
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
        self._admission.drain()
        log.info("stopping: %d requests are ended first, at most %g s", self._admission.num_in_flight, self._drain_s)

    async def ends_before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` ended by itself; False: `stop` was called first. Raises what `work` raises."""
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

    async def drain(self) -> None:
        """Returns when no request is in flight, when the time is up, or at the second `stop`."""
        emptied = asyncio.create_task(self._admission.emptied(self._drain_s))
        at_once = asyncio.create_task(self._stop_at_once.wait())
        await asyncio.wait((emptied, at_once), return_when=asyncio.FIRST_COMPLETED)
        emptied.cancel()
        at_once.cancel()
        if self._admission.num_in_flight:
            log.warning("stopped with %d requests unfinished", self._admission.num_in_flight)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancels the tasks and waits for their end, up to a deadline."""
    for task in tasks:
        task.cancel()
    _, pending = await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S) if tasks else (tasks, ())
    for task in pending:
        log.warning("cancelled, and not ended within %g s: %s", CANCEL_TIMEOUT_S, task.get_coro())
