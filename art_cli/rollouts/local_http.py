"""Calls over HTTP to a server on this machine, such as the gateway, in a fraction of a general client's processor time.

LocalCalls sends one request at a time over each of its connections, keeps them for later requests, and takes answers
whose length is told. It knows no redirects, cookies, proxies, compression, TLS or streams: a general client is for
those. `local_client` puts it under an openai client's own HTTP client, which passes on what LocalCalls does not know.

Standard library only, because the Python that runs rollouts may have nothing else (bootstrap.py).
"""

import asyncio
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})
CONNECT_S = 5.0  # longest wait for a connection, as in the openai client
ANSWER_S = 600.0  # longest wait for an answer, as in the openai client
IDLE_S = 15.0  # time after which an idle connection is not used again; servers close theirs later
MAX_HEAD = 1 << 16  # bytes of an answer's status line and headers
MAX_ANSWER = 1 << 28  # bytes of an answer's body
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*\r\n", re.IGNORECASE)

Headers = list[tuple[bytes, bytes]]


class LocalAnswer(NamedTuple):
    """Example: LocalAnswer(200, [(b"content-type", b"application/json")], b"{}")"""

    status: int
    headers: Headers
    body: bytes


class LocalCalls:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def send(
        self, host: str, port: int, request: bytes, *, connect_s: float | None, answer_s: float | None
    ) -> LocalAnswer:
        """The answer to a whole HTTP/1.1 request. A caller that is cancelled closes its connection.

        Raises TimeoutError; OSError: there is no connection, or it ended or broke before the answer was whole.
        """
        connection = self._take(host, port) or await _connect(host, port, connect_s)
        try:
            async with asyncio.timeout(answer_s):
                answer = await connection.ask(request)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.is_open:
            self._idle.setdefault((host, port), []).append(connection)
        return answer

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.transport.close()
        self._idle.clear()

    def _take(self, host: str, port: int) -> "_Connection | None":
        idle = self._idle.get((host, port), [])
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.is_fresh:
                return connection
            connection.transport.close()
        return None


def request_of(path: str, host: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """A POST request as LocalCalls sends it. Names and values must be free of line breaks."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("ascii")
    return head + body


async def _connect(host: str, port: int, timeout_s: float | None) -> "_Connection":
    async with asyncio.timeout(timeout_s):
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
    return connection


class _Connection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_open = True
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._asked: asyncio.Future[LocalAnswer] | None = None
        self._last_used = self._loop.time()

    @property
    def is_fresh(self) -> bool:
        return self._loop.time() - self._last_used < IDLE_S

    def ask(self, request: bytes) -> "asyncio.Future[LocalAnswer]":
        self._asked = self._loop.create_future()
        self.transport.write(request)
        return self._asked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        try:
            answer = self._answer()
        except ValueError as error:
            self._fail(ConnectionError(f"the server's answer is not understood: {error}"))
            return
        if answer is not None:
            self._last_used = self._loop.time()
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError("the server closed the connection before its answer was whole"))

    def _answer(self) -> LocalAnswer | None:
        """The answer, when it has arrived whole. Raises ValueError: it is none that this reads."""
        if self._asked is None or self._asked.done():
            raise ValueError("nothing was asked")
        end = self._received.find(b"\r\n\r\n")
        if end < 0 and len(self._received) <= MAX_HEAD:
            return None
        head = self._received[: end + 2]
        length = _LENGTH.search(head)
        if not 0 <= end <= MAX_HEAD or not head.startswith(b"HTTP/1.1 ") or length is None:
            raise ValueError("no HTTP/1.1 head with a length")
        begin, size = end + 4, int(length[1])
        if size > MAX_ANSWER or len(self._received) > begin + size:
            raise ValueError("more than one answer, or a huge one")
        if len(self._received) < begin + size:
            return None
        body, self._received = self._received[begin:], b""
        status, *fields = head[:-2].split(b"\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (field.partition(b":") for field in fields)]
        if (b"connection", b"close") in headers:
            self.is_open = False
            self.transport.close()
        return LocalAnswer(int(status[9:12]), headers, body)

    def _fail(self, error: OSError) -> None:
        self.is_open = False
        self.transport.abort()
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)


def local_client(kind: type[Any], calls: LocalCalls) -> Any:
    """A client of this kind, httpx's or httpx2's, whose whole answers of servers on this machine come by `calls`."""
    library: Any = sys.modules[kind.send.__module__.partition(".")[0]]

    class LocalClient(kind):  # type: ignore[misc]
        def build_request(self, method: str, url: Any, **given: Any) -> Any:
            """As in the base class, without what these requests do not have: defaults of this client, cookies."""
            headers, content, timeout = (given.pop(name, None) for name in ("headers", "content", "timeout"))
            if any(given.values()) or not isinstance(content, bytes) or not isinstance(timeout, library.Timeout):
                return super().build_request(method, url, headers=headers, content=content, timeout=timeout, **given)
            timeouts = {"timeout": timeout.as_dict()}
            return library.Request(method, url, headers=headers, content=content, extensions=timeouts)

        async def send(self, request: Any, *, stream: bool = False, **more: Any) -> Any:
            url, is_post = request.url, request.method == "POST"
            if stream or more or not is_post or url.scheme != "http" or url.host not in LOCAL:
                return await super().send(request, stream=stream, **more)
            timeouts = request.extensions["timeout"]
            lines = [b"POST %s HTTP/1.1" % url.raw_path, *(b"%s: %s" % field for field in request.headers.raw)]
            whole = b"\r\n".join([*lines, b"", request.content])
            try:
                answer = await calls.send(
                    url.host, url.port or 80, whole, connect_s=timeouts["connect"], answer_s=timeouts["read"]
                )
            except TimeoutError as error:
                raise library.ReadTimeout("no answer in time", request=request) from error
            except OSError as error:
                raise library.ReadError(str(error), request=request) from error
            return library.Response(answer.status, headers=answer.headers, content=answer.body, request=request)

        async def aclose(self) -> None:
            calls.close()
            await super().aclose()

    return LocalClient()
