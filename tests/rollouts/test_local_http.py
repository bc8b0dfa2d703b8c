"""The light way to a server on this machine answers and fails as a general client does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from art_cli.rollouts.local_http import LocalCalls, local_client, request_of
from art_cli.rollouts.policy import Connections

BODY = b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[]}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
REFUSED = b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}'
Test = Callable[["Server"], Awaitable[None]]


class Server:
    """Answers the n-th request with the n-th of `answers`, the last one again and again; None: not at all."""

    def __init__(self, *answers: bytes | None, closes: bool = False) -> None:
        self._answers, self._closes = answers, closes
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.is_left = asyncio.Event()  # set when a client has closed its connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
                for start in range(0, len(answer or b""), 50):  # in pieces that end anywhere
                    writer.write((answer or b"")[start : start + 50])
                    await asyncio.sleep(0)
                if self._closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_left.set()
        finally:
            writer.close()

    def run(self, test: Test) -> None:
        async def main() -> None:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.port: int = server.sockets[0].getsockname()[1]
            async with asyncio.timeout(60):
                await test(self)
            server.close()

        asyncio.run(main())

    async def ask(self, calls: LocalCalls, answer_s: float | None = None) -> Any:
        request = request_of("/v1/chat/completions", "127.0.0.1", [("x", "y")], b"{}")
        return await calls.send("127.0.0.1", self.port, request, connect_s=5, answer_s=answer_s)

    def client(self, calls: LocalCalls | None = None, **given: Any) -> openai.AsyncOpenAI:
        http = local_client(openai.DefaultAsyncHttpxClient, calls or LocalCalls())
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="k", http_client=http, **given)


def test_a_connection_serves_one_call_after_another() -> None:
    async def test(server: Server) -> None:
        calls = LocalCalls()
        answers = [await server.ask(calls) for _ in range(3)]
        assert {answer.body for answer in answers} == {BODY} and server.num_connections == 1
        assert answers[0].status == 200 and (b"content-type", b"application/json") in answers[0].headers
        assert server.requests[0] == (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y\r\ncontent-length: 2\r\n\r\n{}"
        )
        await asyncio.gather(*(server.ask(calls) for _ in range(3)))
        assert server.num_connections == 3

    Server(OK).run(test)


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async def test(server: Server) -> None:
        calls = LocalCalls()
        for _ in range(3):
            assert (await server.ask(calls)).body == BODY
            while any(connection.is_open for idle in calls._idle.values() for connection in idle):
                await asyncio.sleep(0)
        assert server.num_connections == 3

    Server(OK, closes=True).run(test)


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", OK[:-1], OK + b"x", OK.replace(b"Length", b"Lengthy")])
def test_a_broken_answer_is_an_error_of_transport(answer: bytes) -> None:
    async def test(server: Server) -> None:
        with pytest.raises(ConnectionError):
            await server.ask(LocalCalls())
        with pytest.raises(openai.APIConnectionError):
            await server.client(max_retries=0).chat.completions.create(model="m", messages=[])

    Server(answer, closes=True).run(test)


def test_a_call_that_is_cancelled_or_late_closes_its_connection() -> None:
    async def test(server: Server) -> None:
        calls = LocalCalls()
        task = asyncio.create_task(server.ask(calls))
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        await server.is_left.wait()
        server.is_left.clear()
        with pytest.raises(TimeoutError):
            await server.ask(calls, answer_s=0.01)
        await server.is_left.wait()
        assert not any(calls._idle.values())
        with pytest.raises(openai.APITimeoutError):
            await server.client(max_retries=0, timeout=0.01).chat.completions.create(model="m", messages=[])

    Server(None).run(test)


def test_refusals_and_retries_are_those_of_the_ordinary_client() -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    busy = b"HTTP/1.1 503 Busy\r\nretry-after-ms: 1\r\ncontent-length: 0\r\n\r\n"

    async def test(server: Server) -> None:
        client = server.client()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[])
        assert caught.value.code == "c" and caught.value.body == {
            "message": "no", "type": "t", "param": None, "code": "c"
        }  # fmt: skip
        assert (await client.chat.completions.create(model="m", messages=[])).id == "1"
        assert b"x-stainless-retry-count: 0" in server.requests[1].lower()
        assert b"x-stainless-retry-count: 1" in server.requests[2].lower()

    Server(refused % (len(REFUSED), REFUSED), busy, OK).run(test)


def test_a_server_that_is_not_there_is_an_error_of_transport() -> None:
    async def test(server: Server) -> None:
        server.port = 1
        with pytest.raises(openai.APIConnectionError):
            await server.client(max_retries=0).chat.completions.create(model="m", messages=[])

    Server(OK).run(test)


def test_a_stream_goes_through_the_general_client() -> None:
    event = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'
    events = event + b"data: [DONE]\n\n"
    chunked = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)

    async def test(server: Server) -> None:
        connections = Connections(has_one_loop=True)
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="k", http_client=connections.async_client())
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert [chunk.id async for chunk in stream] == ["1"]
        await connections.close()

    Server(chunked).run(test)
