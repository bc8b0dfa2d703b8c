"""Turns: one model's requests in the order of their numbers, whatever order they arrive in, each once.

A client numbers its requests 1, 2, 3, ... and sends several at once, so that they may arrive in any order. A request
whose predecessors are missing waits for them. All models share one device, on which their requests take turns.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.tinker.server.futures import Failure, Future, FutureAnswer, Futures

MAX_AHEAD = 4096  # how far a request's number may be ahead of the next one to run
Work = Callable[[], Coroutine[Any, Any, FutureAnswer]]


class Turns:
    """The requests of the model `name`."""

    def __init__(self, name: str, futures: Futures, device: asyncio.Lock) -> None:
        self.name = name
        self._futures, self._device = futures, device
        self._next = 1
        self._newest = 0  # highest number so far
        self._waiting: dict[int, tuple[Future, Work]] = {}
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._is_closed = False

    def submit(self, number: int | None, owner: str, digest: bytes, work: Work, num_bytes: int = 0) -> Future:
        """Returns the future of the request with that number, or with the one after all so far if it is None.

        Raises ChatError if its number was used for another request, or is too far ahead.
        """
        if self._is_closed:
            raise ChatError(404, f"{self.name}: the model was unloaded")
        number = self._newest + 1 if number is None else number
        if not 1 <= number < self._next + MAX_AHEAD:
            raise invalid(f"seq_id {number}: the next request of this model is number {self._next}")
        id = f"{self.name}:{number}"
        future, is_new = self._futures.add(id, owner, digest, is_owed=number == self._next, num_bytes=num_bytes)
        if not is_new:
            return future
        if number < self._next:  # it was run, and its answer is no longer kept
            self._futures.settle(future, Failure("this request was run, and its answer is no longer kept", True))
            return future
        self._waiting[number] = future, work
        self._newest = max(self._newest, number)
        if number > self._next:
            future.waits_for = f"request {self._next} of this model has not arrived"
        self._arrived.set()
        return future

    async def _run(self) -> None:
        while True:
            if self._next not in self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            future, work = self._waiting[self._next]
            future.waits_for = "requests of other models are before it"
            async with self._device:
                future.waits_for = ""
                running = asyncio.create_task(self._futures.run(future, work()))
                try:
                    # a request that has begun is run to its end, because the thread cannot be broken off
                    await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait((running,))
                    raise
            del self._waiting[self._next]
            self._next += 1

    async def close(self) -> None:
        """Ends after the request that is running. Those that wait fail."""
        self._is_closed = True
        self._task.cancel()
        await asyncio.wait((self._task,))
        for future, _ in self._waiting.values():
            self._futures.settle(future, Failure("the model was unloaded before this request was run", is_users=False))
        self._waiting.clear()
