"""A proxy that breaks what passes: requests never arrive, answers never come back or in halves, both are repeated.

What it does to the n-th request is decided by its seed. Where the server is not there it answers 502, as proxies do.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import h11
import httpx

HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host", b"accept-encoding"}
UPSTREAM_S = 60.0  # longest wait for an answer of the server


class Rates(NamedTuple):
    """The share of requests to which each thing happens; the rest pass as they are."""

    lost: float = 0.08  # the connection breaks before the server has seen the request
    unanswered: float = 0.08  # the server has done the work; its answer is lost
    cut: float = 0.06  # half of the answer arrives
    repeated: float = 0.08  # the server gets the request twice, at once
    replayed: float = 0.06  # the server gets it once more after its answer
    late: float = 0.08  # request and answer wait up to LATE_S
    refused: float = 0.04  # 503 of a proxy between the two

    @classmethod
    def none(cls) -> "Rates":
        return cls(*(0.0 for _ in cls._fields))


LATE_S = 0.3


class Asked(NamedTuple):
    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class LossyProxy:
    """Between clients and the server at `upstream`. `counts` says how often each thing happened.

    `instead` may answer a request in the server's place, or break its connection by raising ConnectionError.
    """

    def __init__(self, upstream: str, *, seed: int, rates: Rates | None = None) -> None:
        self.upstream = upstream.rstrip("/")
        self.rates = rates if rates is not None else Rates()
        self.counts: Counter[str] = Counter()
        self.instead: Callable[[Asked], httpx.Response | None] = lambda asked: None
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async with httpx.AsyncClient(timeout=UPSTREAM_S, limits=httpx.Limits(max_keepalive_connections=0)) as http:

            def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.create_task(self._converse(http, reader, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            server = await asyncio.start_server(begin, "127.0.0.1", 0)
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                server.close()
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _converse(
        self, http: httpx.AsyncClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers the requests of one connection, until one of them breaks it."""
        connection = h11.Connection(h11.SERVER)
        try:
            with suppress(OSError, h11.RemoteProtocolError):
                while (asked := await _read(connection, reader)) is not None:
                    if not await self._pass(http, asked, connection, writer):
                        writer.transport.abort()
                        return
                    if connection.our_state is h11.MUST_CLOSE:
                        return
                    connection.start_next_cycle()
        finally:
            writer.close()

    async def _pass(
        self, http: httpx.AsyncClient, asked: Asked, connection: h11.Connection, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection goes on."""
        if (own := self.instead(asked)) is not None:
            writer.write(_write(connection, own))
            return True
        fault = self._next_fault()
        self.counts[fault] += 1
        if fault == "lost":
            return False
        if fault == "late":
            await asyncio.sleep(self._chance.uniform(0, LATE_S))
        if fault == "refused":
            answer = httpx.Response(503, content=b"no server is ready")
        else:
            copies = [self._ask(http, asked) for _ in range(2 if fault == "repeated" else 1)]
            answer = (await asyncio.gather(*copies))[-1]
        if fault == "replayed":
            await self._ask(http, asked)
        if fault == "late":
            await asyncio.sleep(self._chance.uniform(0, LATE_S))
        if fault == "unanswered":
            return False
        written = _write(connection, answer)
        writer.write(written[: len(written) - len(answer.content) // 2 - 1] if fault == "cut" else written)
        await writer.drain()
        return fault != "cut"

    async def _ask(self, http: httpx.AsyncClient, asked: Asked) -> httpx.Response:
        url = self.upstream + asked.target
        try:
            return await http.request(asked.method, url, headers=asked.headers, content=asked.body)
        except httpx.HTTPError:
            self.counts["upstream gone"] += 1
            return httpx.Response(502, content=b"the server cannot be reached")

    def _next_fault(self) -> str:
        names = [*self.rates._fields, "passed"]
        weights = [*self.rates, 1.0 - sum(self.rates)]
        return self._chance.choices(names, weights)[0]


async def _read(connection: h11.Connection, reader: asyncio.StreamReader) -> Asked | None:
    """The next request; None: the client has left."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if not (data := await reader.read(1 << 16)) and head is None:
                return None
            connection.receive_data(data)
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            headers = [(name, value) for name, value in head.headers if name not in HOP_BY_HOP]
            return Asked(head.method.decode(), head.target.decode(), headers, bytes(body))
        else:
            return None


def _write(connection: h11.Connection, answer: httpx.Response) -> bytes:
    headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in HOP_BY_HOP]
    headers.append((b"content-length", str(len(answer.content)).encode()))
    head = connection.send(h11.Response(status_code=answer.status_code, headers=headers))
    body = connection.send(h11.Data(data=answer.content))
    end = connection.send(h11.EndOfMessage())
    return b"".join(part for part in (head, body, end) if part)
