"""Runs an ASGI application on a port of this machine, on the running event loop, with deadlines for start and stop."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from art_cli.chat.client_connection import Connection, Timeouts
from art_cli.runtime.errors import EngineError

START_TIMEOUT_S = 30.0
GRACE_S = 5  # longest wait for requests in flight when the server stops
KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections (httpx: 5 s), so that the clients close them
BACKLOG = 2048


@contextlib.asynccontextmanager
async def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    timeouts: Timeouts | None = None,
    grace_s: int = GRACE_S,
) -> AsyncIterator[str]:
    """Yields the server's root, `http://127.0.0.1:41233`, while it answers there; port 0 takes any free one.

    When it stops, requests in flight have `grace_s` seconds to end. Raises EngineError: the address is not available.
    """
    listener = _listen(host, port)
    server = _Server(_configure(app, timeouts or Timeouts(), grace_s))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _until_ready(server.is_ready, task)
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
    # The protocol is named because asyncio sets TCP_NODELAY only if it is. Without TCP_NODELAY each reply waits 40 ms
    # for the client's delayed acknowledgement of its head.
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


def _authority(host: str) -> str:
    """Returns the host name by which clients on this machine reach a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


class _Server(uvicorn.Server):
    """Leaves signals to the owner of the process, and sets `is_ready` when it listens."""

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
