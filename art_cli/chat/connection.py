"""One client's connection: uvicorn's, which by itself waits for ever for a slow client, with deadlines.

`Patience` says how long: for a request to arrive whole, and for a client to take in some of what it is sent. The
application can wait until a client has taken in all of it: `delivered`.
"""

import asyncio
from typing import Any, NamedTuple

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10  # of a request before its body; nginx allows 32 KiB
DELIVERY = "art.delivery"  # among the extensions of an ASGI scope


class Patience(NamedTuple):
    """How long a connection may be slow, in seconds."""

    request_s: float = (
        75.0  # from its first byte until a request is there whole; the application's own limit is shorter
    )
    read_s: float = 60.0  # for a client that takes in nothing while there is something for it


async def delivered(scope: Scope) -> None:
    """Returns when the system has taken all that was sent to this client, or the client is gone.

    It has a deadline: a client is gone that takes in nothing for `Patience.read_s`.
    """
    if (delivery := scope.get("extensions", {}).get(DELIVERY)) is not None:
        await delivery["drain"]()


class Connection(HttpToolsProtocol):
    def __init__(self, *, patience: Patience, **given: Any) -> None:
        super().__init__(**given)
        self._patience = patience
        self._arriving: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._num_unread = 0  # bytes, when they were last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing is paused while there is anything the system did not take
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._taking):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # --- a request arrives --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data) if self._is_in_headers else 0
        super().data_received(data)
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {DELIVERY: {"drain": self.flow.drain}}
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

    def _await_request(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(self._patience.request_s, self._give_up_request)

    def _give_up_request(self) -> None:
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

    # --- a reply leaves -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()  # only gets smaller: nothing is written while paused
        self._taking = self.loop.call_later(self._patience.read_s, self._give_up_reader)

    def _give_up_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread:
            self._await_reader()
        else:
            self.transport.abort()
