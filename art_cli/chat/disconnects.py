"""Works for a client while it is there: a client that goes away cancels what is done for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. Raises ClientDisconnect if the client goes away; `work` is cancelled and has ended.

    It runs in the caller's task, which a second, short one watches over.
    """
    watch = _Watch(receive)
    try:
        result = await work
    except asyncio.CancelledError:
        if watch.has_cancelled and watch.task.uncancel() == 0:  # only this watch cancelled it
            raise ClientDisconnect from None
        raise
    finally:
        watch.end()
    if watch.has_cancelled:  # amid the last step of the work, so that the next wait will notice
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if watch.task.uncancel():
                raise
        raise ClientDisconnect
    return result


class _Watch:
    """Cancels the present task when its client goes away, until `end`."""

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        self.task, self.has_cancelled = task, False
        self._watching = asyncio.create_task(self._look(receive))

    async def _look(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.has_cancelled = True
        self.task.cancel()

    def end(self) -> None:
        self._watching.cancel()
