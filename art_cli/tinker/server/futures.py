"""Futures: the answers that clients ask for later, by the id of their request. Each request is run once.

A client that got no answer sends its request again, and asks for the same answer again: both find what is there. An
answer is kept until room is needed. The client that holds most makes room, first with what it has fetched, so that
no client loses an answer by what others send.
"""

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.runtime.errors import ArtError, is_full_disk, one_line

log = logging.getLogger(__name__)

Json = dict[str, Any]

MAX_KEPT = 20_000  # answers that are kept, of all clients together
MAX_KEPT_BYTES = 512 * 2**20
SMALL = 512  # bytes that an answer without tokens counts


class FutureAnswer(NamedTuple):
    """The answer to a request. Both forms are made when a client asks, because one of them is enough."""

    as_json: Callable[[], Json]
    as_proto: Callable[[], bytes] | None = None  # None if this kind of answer is JSON only
    num_bytes: int = SMALL


def plain_answer(fields: Json) -> FutureAnswer:
    """Returns an answer that is JSON only, and small."""
    return FutureAnswer(lambda: fields)


class Failure(NamedTuple):
    """Why a request gave nothing. `is_users`: the client can mend it."""

    message: str
    is_users: bool


@dataclass(eq=False)
class Future:
    """One request that was accepted."""

    id: str
    owner: str
    digest: bytes  # hash of what was asked
    state: str = "queued"  # queued, running, done
    waits_for: str = ""  # the reason for waiting that a client gets
    result: FutureAnswer | Failure | None = None
    num_bytes: int = 0  # the request's size, until it is answered
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def finish(self, result: FutureAnswer | Failure) -> None:
        if self.result is None:
            self.result, self.state = result, "done"
            self.done.set()


@dataclass(eq=False)
class _Account:
    """The answers held for one client. The oldest answers come first."""

    num_open: int = 0  # unanswered requests
    open_bytes: int = 0  # their size
    num_bytes: int = 0  # the answers' size
    fetched: OrderedDict[str, Future] = field(default_factory=OrderedDict)
    unfetched: OrderedDict[str, Future] = field(default_factory=OrderedDict)

    @property
    def num_kept(self) -> int:
        return len(self.fetched) + len(self.unfetched)


class Futures:
    """`pending` and `pending_bytes` bound the unanswered requests of one client, and what they hold."""

    def __init__(self, *, pending: int, pending_bytes: int) -> None:
        self._pending, self._pending_bytes = pending, pending_bytes
        self._futures: dict[str, Future] = {}
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self._num_kept = self._num_bytes = 0
        self._is_closing = False

    @property
    def num_open(self) -> int:
        """The number of unanswered requests."""
        return sum(account.num_open for account in self._accounts.values())

    def add(
        self, id: str, owner: str, digest: bytes, *, is_owed: bool = False, num_bytes: int = 0
    ) -> tuple[Future, bool]:
        """Returns the future of the request, and whether it is new. Raises ChatError if another had that id (400), or
        too many of this client's are unanswered (429), or the server is stopping (503).

        `is_owed`: others wait for this request, so that it is accepted however many these are.
        """
        known = self._futures.get(id)
        if known is not None:
            if known.digest != digest or known.owner != owner:
                raise invalid(f"{id}: another request was sent under this number")
            return known, False
        if self._is_closing:
            raise ChatError(503, "the server is stopping", retry_after="5")
        account = self._accounts[owner]
        if not is_owed and account.num_open >= self._pending:
            raise ChatError(429, f"{self._pending} requests of this client are unanswered", retry_after="1")
        if not is_owed and account.num_open and account.open_bytes + num_bytes > self._pending_bytes:
            size = f"{self._pending_bytes / 2**20:g} MiB"
            raise ChatError(429, f"unanswered requests of this client hold {size}", retry_after="1")
        future = self._futures[id] = Future(id, owner, digest, num_bytes=num_bytes)
        account.num_open += 1
        account.open_bytes += num_bytes
        return future, True

    def get(self, id: str, owner: str) -> Future:
        """Raises ChatError 404 if this client has no such request, or its answer was dropped."""
        future = self._futures.get(id)
        if future is None or future.owner != owner:
            raise ChatError(404, f"no request {id[:200]!r}: it was never sent, or its answer is no longer kept")
        return future

    def start(self, future: Future, work: Coroutine[Any, Any, FutureAnswer]) -> None:
        """Runs the work by itself, beside all others."""
        future.task = asyncio.create_task(self.run(future, work))

    async def run(self, future: Future, work: Coroutine[Any, Any, FutureAnswer]) -> None:
        """Runs the work and keeps its result. Never raises but when it is cancelled."""
        future.state = "running"
        try:
            result: FutureAnswer | Failure = await work
        except asyncio.CancelledError:
            self.settle(future, Failure("the request was cancelled", is_users=False))
            raise
        except ChatError as error:
            result = Failure(error.message, is_users=error.status < 500)
        except ArtError as error:
            result = Failure(one_line(error), is_users=True)
        except Exception as error:  # the boundary to the learner and the engine: one request must not end the server
            if is_full_disk(error):
                log.error("%s: no space left on the disk of the checkpoints; nothing was saved", future.id)
                result = Failure("no space left on the server's disk; nothing was saved: free some there", False)
            else:
                log.exception("a request failed")
                result = Failure(f"{type(error).__name__}: {one_line(error)}", is_users=False)
        self.settle(future, result)

    def settle(self, future: Future, result: FutureAnswer | Failure) -> None:
        """Gives the future its result, and drops old answers where room is needed."""
        if future.result is not None:
            return
        future.finish(result)
        account = self._accounts[future.owner]
        account.num_open -= 1
        account.open_bytes -= future.num_bytes
        account.unfetched[future.id] = future
        self._count(account, future, 1)
        while self._num_bytes > MAX_KEPT_BYTES or self._num_kept > MAX_KEPT:
            is_large = self._num_bytes > MAX_KEPT_BYTES
            richest = max(self._accounts.values(), key=lambda each: each.num_bytes if is_large else each.num_kept)
            held = richest.fetched or richest.unfetched
            old = next(iter(held.values()))
            if old is future:  # one answer is kept, however large it is
                return
            del held[old.id], self._futures[old.id]
            self._count(richest, old, -1)

    def _count(self, account: _Account, future: Future, sign: int) -> None:
        size = sign * _size(future)
        account.num_bytes += size
        self._num_bytes += size
        self._num_kept += sign

    def mark_fetched(self, future: Future) -> None:
        """Puts it among the first of its client that make room."""
        account = self._accounts[future.owner]
        if account.unfetched.pop(future.id, None) is not None:
            account.fetched[future.id] = future

    async def wait(self, future: Future, timeout_s: float) -> bool:
        """Returns whether the result is there, at the latest when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await future.done.wait()
        except TimeoutError:
            return False
        return True

    def cancel(self, future: Future) -> None:
        if future.task is not None:
            future.task.cancel()

    def refuse(self) -> None:
        """Accepts nothing more."""
        self._is_closing = True

    async def finish(self) -> None:
        """Returns when the requests that run by themselves have ended."""
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Accepts nothing more; what is unanswered fails."""
        self.refuse()
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for future in list(self._futures.values()):
            if future.result is None:
                self.settle(future, Failure("the server was stopped before this request was run", is_users=False))

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [each.task for each in self._futures.values() if each.task is not None and not each.task.done()]


def _size(future: Future) -> int:
    """Bytes of its result."""
    result = future.result
    return SMALL + len(result.message) if isinstance(result, Failure) else result.num_bytes if result else 0
