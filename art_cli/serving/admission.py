"""Admission: how many requests are in flight, and whether more are admitted. It knows nothing of HTTP or engines.

    loading -> open -> draining        requests are admitted only while it is open

An admitted request is read, then waits for a slot at the engine, first come first served. It holds the slot until its
whole answer is sampled, and is in flight until the client has taken that answer or gone. `concurrency` requests have
slots at once; `queue` more may be in flight.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from art_cli.chat.chat_errors import ChatError

LONGEST_RETRY_S = 60
LOADING_RETRY_S = 5
SMOOTHING = 0.1  # weight of the newest answer in the mean duration of answers


class Admission:
    def __init__(self, *, concurrency: int, queue: int) -> None:
        self.concurrency, self.queue = concurrency, queue
        self.state = "loading"  # loading, open, draining
        self.num_in_flight = 0  # admitted requests whose client has neither taken the answer nor gone
        self.num_waiting = 0  # requests in flight that wait for a slot
        self.num_answering = 0  # requests in flight that have a slot
        self._slots = asyncio.Semaphore(concurrency)
        self._empty = asyncio.Event()
        self._empty.set()
        self._answer_s = 1.0  # smoothed mean duration of an answer

    def open(self) -> None:
        """Admits requests from now on, unless it drains already."""
        if self.state == "loading":
            self.state = "open"

    def drain(self) -> None:
        """Admits no request from now on."""
        self.state = "draining"

    async def emptied(self) -> None:
        """Returns when no request is in flight."""
        await self._empty.wait()

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts one request in flight. Raises ChatError: 503 if it is not open, 429 if too many are in flight."""
        self._check()
        self.num_in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Yields a slot at the engine, first come first served."""
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_answering += 1
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._slots.release()
            self.num_answering -= 1
            self._answer_s += SMOOTHING * (time.perf_counter() - begin - self._answer_s)

    def _check(self) -> None:
        if self.state == "loading":
            raise ChatError(503, "the model is being loaded", code="loading", retry_after=str(LOADING_RETRY_S))
        if self.state == "draining":
            raise ChatError(503, "the server is shutting down", code="shutting_down", retry_after=str(LOADING_RETRY_S))
        if self.num_in_flight >= self.concurrency + self.queue:
            message = f"{self.num_in_flight} requests are here already; try again later"
            raise ChatError(429, message, "rate_limit_error", None, "overloaded", retry_after=str(self._retry_s()))

    def _retry_s(self) -> int:
        """Estimated seconds until the waiting requests are answered, from the mean duration of an answer."""
        rounds = self.num_waiting / self.concurrency
        return max(1, min(LONGEST_RETRY_S, round(rounds * self._answer_s)))
