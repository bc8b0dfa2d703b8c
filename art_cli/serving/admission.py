"""Admission: how many requests are in the house, and whether more may come in. It knows nothing of HTTP or engines.

    closed -> open -> draining        requests are let in only while it is open

A request that was let in is read, then waits for a place at the engine, in order. It has the place until all of its
answer is sampled, and is in the house until its client has taken that answer or gone. `concurrency` have places at
once, `queue` more may be in the house.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from art_cli.chat.errors import ChatError

LONGEST_RETRY_S = 60
LOADING_RETRY_S = 5
SMOOTHING = 0.1  # weight of the newest answer in the mean time of one


class Admission:
    def __init__(self, *, concurrency: int, queue: int) -> None:
        self.concurrency, self.queue = concurrency, queue
        self.state = "loading"  # loading, open, draining
        self.num_inside = 0  # let in and not gone
        self.num_waiting = 0  # of these, for a place
        self.num_answering = 0  # of these, at the engine
        self._places = asyncio.Semaphore(concurrency)
        self._empty = asyncio.Event()
        self._empty.set()
        self._answer_s = 1.0  # smoothed mean

    def open(self) -> None:
        """Requests come in, unless it was told before that none shall."""
        if self.state == "loading":
            self.state = "open"

    def drain(self) -> None:
        """Nothing more comes in."""
        self.state = "draining"

    async def emptied(self, timeout_s: float) -> int:
        """How many are left when all are gone or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self.num_inside

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """One request in the house. Raises ChatError: 503 while it is not open, 429 while it is full."""
        self._check()
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def placed(self) -> AsyncIterator[None]:
        """A place at the engine, first come first served."""
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        self.num_answering += 1
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._places.release()
            self.num_answering -= 1
            self._answer_s += SMOOTHING * (time.perf_counter() - begin - self._answer_s)

    def _check(self) -> None:
        if self.state == "loading":
            raise ChatError(503, "the model is being loaded", code="loading", retry_after=str(LOADING_RETRY_S))
        if self.state == "draining":
            raise ChatError(503, "the server is shutting down", code="shutting_down", retry_after=str(LOADING_RETRY_S))
        if self.num_inside >= self.concurrency + self.queue:
            message = f"{self.num_inside} requests are here already; try again later"
            raise ChatError(429, message, "rate_limit_error", None, "overloaded", retry_after=str(self._retry_s()))

    def _retry_s(self) -> int:
        """Seconds until those who wait have been answered, by what an answer took lately."""
        rounds = self.num_waiting / self.concurrency
        return max(1, min(LONGEST_RETRY_S, round(rounds * self._answer_s)))
