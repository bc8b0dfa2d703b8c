"""Runs an ASGI application on a local port on the running event loop, with deadlines for start and stop.

uvicorn alone waits forever for a slow client. Connection sits between the transport and uvicorn's protocol and forwards
every event. It limits the header size and disconnects clients that send a request or read a reply too slowly
(`Timeouts`). It uses only documented interfaces of asyncio and httptools, and no uvicorn internals.

Writing is paused until the operating system has accepted all data. An ASGI `send` therefore returns after all earlier
data was sent or the client disconnected. `unless_disconnected` cancels an application's work when its client
disconnects. Stopping implements shutdown: a signal refuses new requests, and requests in flight finish or time out.
"""

import asyncio
import contextlib
import errno
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import httptools
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from art_cli.runtime.errors import EngineError, first_of_group

log = logging.getLogger(__name__)
Result = TypeVar("Result")
MAX_HEADER_BYTES = 64 * 2**10  # maximum header size; nginx allows 32 KiB
START_TIMEOUT_S = 30.0
GRACE_S = 5  # longest wait for requests in flight when the server stops
KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections (httpx: 5 s), so the clients close them
BACKLOG = 2048
# Begins the header with which Java's HTTP client offers HTTP/2. Of such a request, httptools would drop the body.
_UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)
CANCEL_TIMEOUT_S = 60.0  # longest wait for cancelled work; a vLLM server stopped during startup takes 20 s


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. Raises ClientDisconnect, after cancelling `work`, if the client disconnects.

    `work` runs in the caller's task. A second task watches the connection.
    """
    connected = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        connected.reschedule(0)  # cancels `work` now

    watching = asyncio.create_task(watch())
    try:
        async with connected:
            result = await work
    except TimeoutError:
        if not connected.expired():
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()
    if connected.expired():  # `work` ended normally in spite of it
        raise ClientDisconnect
    return result


class Timeouts(NamedTuple):
    request_s: float = 75.0  # from a request's first byte to the last byte; the application's limit is shorter
    read_s: float = 60.0  # longest time in which a client reads no data


class Connection(asyncio.Protocol):
    """Forwards a client's events to uvicorn's protocol, and parses requests only to find where they end."""

    def __init__(self, *, timeouts: Timeouts, **given: Any) -> None:
        """`given` are the arguments that uvicorn's server passes to a protocol."""
        self._server = HttpToolsProtocol(**given)
        self._timeouts = timeouts
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._arriving: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._num_requests = 0  # requests that have arrived whole
        self._num_unread = 0  # buffered bytes at the last check

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._server.connection_made(self._transport)
        self._transport.set_write_buffer_limits(high=0)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._taking):
            if timer is not None:
                timer.cancel()
        self._server.connection_lost(exc)

    def eof_received(self) -> None:
        self._server.eof_received()

    # --- a request arrives --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers and _UPGRADE.search(data):
            head, end, body = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nIgnored", head) + end + body
        self._num_header_bytes += len(data) if self._is_in_headers else 0
        if self._parser is not None:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # uvicorn ignores it, too
            except httptools.HttpParserError:
                self._parser = None  # uvicorn's parser fails on the same bytes, and uvicorn answers 400
        if self._num_header_bytes and self._arriving is None:  # blank lines before a request
            self._await_request()
        self._server.data_received(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        self._await_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_headers:  # a trailer, behind the body
            self._num_header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._num_header_bytes = False, 0

    def on_message_complete(self) -> None:
        self._is_in_headers, self._num_header_bytes = True, 0
        self._num_requests += 1
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _await_request(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = self._loop.call_later(self._timeouts.request_s, self._give_up_request)

    def _give_up_request(self) -> None:
        if not self._transport.is_reading():  # uvicorn has paused it, because it is answering an earlier request
            self._await_request()
        elif self._is_in_headers and self._num_header_bytes:
            self._refuse(408, "Request Timeout")
        else:
            self._transport.abort()

    def _refuse(self, status: int, reason: str) -> None:
        """Refuses a request that has not reached the application. During another answer, only closes the connection."""
        if self._num_requests or not self._is_in_headers:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 %d %s\r\nconnection: close\r\n\r\n" % (status, reason.encode()))
            self._transport.close()

    # --- a reply leaves -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._server.pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        self._server.resume_writing()

    def _await_reader(self) -> None:
        self._num_unread = self._transport.get_write_buffer_size()  # it only shrinks while writing is paused
        self._taking = self._loop.call_later(self._timeouts.read_s, self._give_up_reader)

    def _give_up_reader(self) -> None:
        if self._transport.get_write_buffer_size() < self._num_unread:
            self._await_reader()
        else:
            self._transport.abort()


@contextlib.asynccontextmanager
async def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    timeouts: Timeouts | None = None,
    grace_s: int = GRACE_S,
) -> AsyncIterator[str]:
    """Yields the root URL, such as `http://127.0.0.1:41233`, while the server is running. Port 0 selects any free port.

    On exit, requests in flight have `grace_s` seconds to finish. Raises EngineError if the address is not available.
    """
    listener = _listen(host, port)
    server = _Server(_configure(app, timeouts or Timeouts(), grace_s))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _until_ready(server.is_ready, task)
        name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # for clients on this machine
        yield f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait((task,), timeout=grace_s + GRACE_S)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=GRACE_S)
        listener.close()
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise EngineError(f"the server failed: {type(error).__name__}: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it each reply waits 40 ms for the client's delayed
    # acknowledgement of the headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise EngineError(
            f"cannot listen on {host}:{port}: {reason}; choose another port, or 0 for any free one"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to the process, and sets `is_ready` once it is listening."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_ready.set()


def _configure(app: ASGIApp, timeouts: Timeouts, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Connection, timeouts=timeouts)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,  # the address in a scope is the connection's, not one from a header
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=grace_s,
    )


async def _until_ready(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
    waiter = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((waiter, task), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    if not ready.is_set():
        raise EngineError(f"the server did not start within {START_TIMEOUT_S:.0f} s")


class Stopping:
    """Graceful shutdown: `refuse` refuses new requests, and `num_running` requests have `drain_s` to finish."""

    def __init__(self, drain_s: float, *, refuse: Callable[[], None], num_running: Callable[[], int]) -> None:
        self._drain_s, self._refuse, self._num_running = drain_s, refuse, num_running
        self._stop, self._stop_at_once = asyncio.Event(), asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Refuses new requests. A second call stops waiting for requests in flight."""
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
        """Waits for `work`, which waits for requests in flight, until the time is up or `stop` is called again."""
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
