"""Futures: stored answers by request id. Clients poll for them, and each request runs once.

Clients resend requests and polls after a lost reply; both reach the existing future. Answers are kept until room is
needed. The client with the most stored answers makes room, starting with fetched answers, so clients cannot push out
answers of other clients.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.requests import Json
from art_cli.runtime.errors import ArtError, is_full_disk, one_line
from art_cli.runtime.threads import end

log = logging.getLogger(__name__)

MAX_KEPT = 20_000  # maximum number of stored answers, over all clients
MAX_KEPT_BYTES = 512 * 2**20
SMALL = 512  # size of answers without tokens
CLOSE_TIMEOUT_S = 5.0


class FutureAnswer(NamedTuple):
    """An answer to a request. Encoded when the client fetches it, because only one format is needed."""

    as_json: Callable[[], Json]
    as_proto: Callable[[], bytes] | None = None  # None for JSON-only answers
    num_bytes: int = SMALL


def plain_answer(fields: Json) -> FutureAnswer:
    """Returns a small, JSON-only answer."""
    return FutureAnswer(lambda: fields)


class Failure(NamedTuple):
    """The reason why a request failed. `is_users`: the client can fix it."""

    message: str
    is_users: bool


@dataclass(eq=False)
class Future:
    id: str
    owner: str
    digest: bytes  # hash of the request
    state: str = "queued"  # queued, running, done
    waits_for: str = ""  # reason for waiting, shown to the client
    result: FutureAnswer | Failure | None = None
    num_bytes: int = 0  # the request's size while unanswered
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Account:
    """The stored answers of a client, oldest first."""

    num_open: int = 0  # number of unanswered requests
    open_bytes: int = 0  # size of unanswered requests
    num_bytes: int = 0  # size of answers
    fetched: OrderedDict[str, Future] = field(default_factory=OrderedDict)
    unfetched: OrderedDict[str, Future] = field(default_factory=OrderedDict)

    @property
    def num_kept(self) -> int:
        return len(self.fetched) + len(self.unfetched)


class Futures:
    """`pending` and `pending_bytes` limit the number and size of unanswered requests per client."""

    def __init__(self, *, pending: int, pending_bytes: int) -> None:
        self._pending, self._pending_bytes = pending, pending_bytes
        self._futures: dict[str, Future] = {}
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self._num_kept = self._num_bytes = 0
        self._is_closing = False

    @property
    def num_open(self) -> int:
        return sum(account.num_open for account in self._accounts.values())

    def add(
        self, id: str, owner: str, digest: bytes, *, is_owed: bool = False, num_bytes: int = 0
    ) -> tuple[Future, bool]:
        """Returns the request's future, and whether it is new. Raises ChatError if a different request used this id
        (400), if the client has too many unanswered requests (429), or if the server is stopping (503).

        `is_owed`: later requests wait for this request, so it is accepted beyond the limit.
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
        """Returns the client's future. Raises ChatError 404 for unknown requests and dropped answers."""
        future = self._futures.get(id)
        if future is None or future.owner != owner:
            raise ChatError(404, f"no request {id[:200]!r}: it was never sent, or its answer has been dropped")
        return future

    def start(self, future: Future, work: Coroutine[Any, Any, FutureAnswer]) -> None:
        """Runs the work concurrently with other requests."""
        future.task = asyncio.create_task(self.run(future, work))

    async def run(self, future: Future, work: Coroutine[Any, Any, FutureAnswer]) -> None:
        """Runs the work and stores its result. Raises only when cancelled."""
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
        except Exception as error:  # boundary to learner and engine: a failing request must not stop the server
            if is_full_disk(error):
                log.error("%s: no space left on the disk of the checkpoints; nothing was saved", future.id)
                result = Failure("no space left on the server's disk; nothing was saved: free some there", False)
            else:
                log.exception("a request failed")
                result = Failure(f"{type(error).__name__}: {one_line(error)}", is_users=False)
        self.settle(future, result)

    def settle(self, future: Future, result: FutureAnswer | Failure) -> None:
        """Stores the result and drops old answers if room is needed."""
        if future.result is not None:
            return
        future.result, future.state = result, "done"
        future.done.set()
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
            if old is future:  # always keep at least one answer, regardless of size
                return
            del held[old.id], self._futures[old.id]
            self._count(richest, old, -1)

    def _count(self, account: _Account, future: Future, sign: int) -> None:
        result = future.result
        size = SMALL + len(result.message) if isinstance(result, Failure) else result.num_bytes if result else 0
        account.num_bytes += sign * size
        self._num_bytes += sign * size
        self._num_kept += sign

    def mark_fetched(self, future: Future) -> None:
        """Marks an answer as droppable before unfetched answers."""
        account = self._accounts[future.owner]
        if account.unfetched.pop(future.id, None) is not None:
            account.fetched[future.id] = future

    async def wait(self, future: Future, timeout_s: float) -> bool:
        """Waits up to `timeout_s`; returns True when the result is ready."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), timeout_s)
        return future.done.is_set()

    def cancel(self, future: Future) -> None:
        if future.task is not None:
            future.task.cancel()

    def refuse(self) -> None:
        self._is_closing = True

    async def finish(self) -> None:
        """Waits for the concurrent requests to end."""
        if tasks := self._tasks():
            await asyncio.wait(tasks)

    async def close(self) -> None:
        self.refuse()
        await end(*self._tasks(), timeout_s=CLOSE_TIMEOUT_S)
        for future in list(self._futures.values()):
            if future.result is None:
                self.settle(future, Failure("the server was stopped before this request was run", is_users=False))

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [each.task for each in self._futures.values() if each.task is not None and not each.task.done()]
