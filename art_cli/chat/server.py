"""Runs an ASGI application on a port of this machine, on the running event loop, with deadlines for start and stop.

A connection has deadlines too (`Patience`): for a request to arrive whole, and for a client to take in what it is sent.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp

from art_cli.errors import EngineError

if TYPE_CHECKING:
    import uvicorn

START_TIMEOUT_S = 30.0
GRACE_S = 5  # for requests in flight to end when the server stops
KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections (httpx: 5 s), so that it is they who close them
BACKLOG = 2048
MAX_HEADER_BYTES = 64 * 2**10  # of a request before its body; nginx allows 32 KiB


class Patience(NamedTuple):
    """How long a connection may be slow, in seconds."""

    request_s: float = (
        75.0  # from its first byte until a request is there whole; the application's own limit is shorter
    )
    read_s: float = 60.0  # for a client that reads nothing while there is something for it


@contextlib.asynccontextmanager
async def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    patience: Patience | None = None,
    grace_s: int = GRACE_S,
) -> AsyncIterator[str]:
    """Yields the server's root, `http://127.0.0.1:41233`, while it answers there; port 0 takes any free one.

    When it stops, requests in flight have `grace_s` to end. Raises EngineError: the address cannot be had.
    """
    listener = _listen(host, port)
    server, ready = _make_server(app, patience or Patience(), grace_s)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _until_ready(ready, task)
        yield f"http://{_authority(host)}:{listener.getsockname()[1]}"
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
    listener = socket.socket(family, socket.SOCK_STREAM)
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


def _authority(host: str) -> str:
    """Where clients on this machine reach a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def _make_server(app: ASGIApp, patience: Patience, grace_s: int) -> tuple["uvicorn.Server", asyncio.Event]:
    import uvicorn

    ready = asyncio.Event()

    class Server(uvicorn.Server):
        """Leaves signals to whoever owns the process, and says when it is ready."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready.set()

    config = uvicorn.Config(
        app,
        http=_connection_class(patience),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=grace_s,
    )
    return Server(config), ready


def _connection_class(patience: Patience) -> type[asyncio.Protocol]:
    """uvicorn's connection, which by itself waits for ever for a slow client."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(HttpToolsProtocol):
        _arriving: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None
        _is_in_headers = True
        _num_header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._arriving, self._taking):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._num_header_bytes += len(data) if self._is_in_headers else 0
            super().data_received(data)
            if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, "Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_request()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._is_in_headers:  # not what follows a body
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_in_headers = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._is_in_headers, self._num_header_bytes = True, 0
            if self._arriving is not None:
                self._arriving.cancel()
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taking = self.loop.call_later(patience.read_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self._taking is not None:
                self._taking.cancel()
            super().resume_writing()

        def _await_request(self) -> None:
            if self._arriving is not None:
                self._arriving.cancel()
            self._arriving = self.loop.call_later(patience.request_s, self._give_up)

        def _give_up(self) -> None:
            if self.flow.read_paused:  # it is we who do not read: another request is being answered
                self._await_request()
            elif self._is_in_headers and self._num_header_bytes:
                self._refuse(408, "Request Timeout")
            else:
                self.transport.abort()

        def _refuse(self, status: int, reason: str) -> None:
            """What there is no request for yet, and so no application."""
            if self.cycle is not None and not self.cycle.response_complete:  # the answer to an earlier one is under way
                self.transport.abort()
            elif not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 %d %s\r\nconnection: close\r\n\r\n" % (status, reason.encode()))
                self.transport.close()

    return Connection


async def _until_ready(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
    waiter = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((waiter, task), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    if not ready.is_set():
        raise EngineError(f"the server did not start within {START_TIMEOUT_S:.0f} s")
