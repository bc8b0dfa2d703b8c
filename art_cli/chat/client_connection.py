"""Connection: one client's connection to the server, with deadlines for a slow client; work that ends with its client.

uvicorn by itself waits for ever for a slow client. Connection stands between the transport and uvicorn's protocol and
passes every event on. It counts the bytes of headers, and cuts a client off that sends its request or takes its reply
too slowly (`Timeouts`). It uses asyncio's and httptools' documented interfaces only, and nothing inside uvicorn.

Writing is paused while the system has not taken everything, so an ASGI `send` returns once all earlier pieces have
left for the client, or the client is gone. `unless_disconnected` cancels an application's work when its client goes
away.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar, cast

import httptools
from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


MAX_HEADER_BYTES = 64 * 2**10  # size limit of a request's headers; nginx allows 32 KiB


class Timeouts(NamedTuple):
    """The longest times, in seconds, that a client may be slow."""

    request_s: float = (
        75.0  # longest time from a request's first byte to its last; the application's own limit is shorter
    )
    read_s: float = 60.0  # longest time in which a client takes no byte of its reply


class Connection(asyncio.Protocol):
    """Passes one client's events on to uvicorn's protocol; parses its requests only to know where they end."""

    def __init__(self, *, timeouts: Timeouts, **given: Any) -> None:
        """`given` are the arguments that uvicorn's server creates a protocol with."""
        self._server = HttpToolsProtocol(**given)
        self._timeouts = timeouts
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._arriving: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._num_requests = 0  # requests that have arrived whole
        self._num_unread = 0  # bytes in the transport's buffer when it was last looked at

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
        """Answers a request that has not reached the application. Later ones may come amid an answer: no words then."""
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
