"""Endpoints that answer far too much: HttpBackend and the calls that steer vLLM read an answer up to a size."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import MAX_ANSWER, HttpBackend
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.vllm.control import Control, Refused, Unreachable
from art_cli.runtime.errors import EngineError
from tests.support.attacks.hostile import MemoryBound

SPACES_MIB = 1000


def packed_spaces() -> bytes:
    """gzip of 1,000 MiB of spaces: one MiB's member, repeated."""
    return gzip.compress(b" " * (1 << 20), 9) * SPACES_MIB


@asynccontextmanager
async def answering(status: int, head: str, body: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {status} X\r\n{head}Connection: close\r\n\r\n".encode())
            for start in range(0, len(body), 1 << 16):
                writer.write(body[start : start + (1 << 16)])
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bomb_from_an_endpoint_is_a_broken_reply_and_takes_no_memory(status: int, is_stream: bool) -> None:
    request = Request(model="m", messages=[{"role": "user", "content": "x"}], sampling=Sampling(), is_stream=is_stream)
    with MemoryBound(mib=MAX_ANSWER * 4 >> 20):
        async with answering(status, "Content-Encoding: gzip\r\n", packed_spaces()) as root:
            backend = HttpBackend(f"{root}/v1", "key", "m")
            with pytest.raises(ChatError, match="larger than") as refused:
                if is_stream:
                    async for _ in backend.stream(request):
                        pass
                else:
                    await backend.reply(request)
            await backend.close()
    assert refused.value.status == 502


@pytest.mark.parametrize("status", [200, 500])
async def test_a_bomb_from_a_vllm_server_is_an_error_in_words(status: int) -> None:
    with MemoryBound(mib=MAX_ANSWER * 4 >> 20):
        async with answering(status, "Content-Encoding: gzip\r\n", packed_spaces()) as root:
            control = Control(root, "key")
            with pytest.raises(EngineError, match="larger than") as refused:
                await control.models()
            await control.close()
    assert not isinstance(refused.value, Refused | Unreachable)


@pytest.mark.parametrize("form", ["sk-canary/0011", "SK-CANARY/0011", "sk-canary%2f0011", "sk-canary\\u002f0011"])
async def test_an_endpoint_that_quotes_the_key_in_another_form_does_not_spread_it(form: str) -> None:
    body = f'{{"error": {{"message": "you sent {form} to us"}}}}'.encode()
    request = Request(model="m", messages=[{"role": "user", "content": "x"}], sampling=Sampling())
    async with answering(500, "", body) as root:
        backend = HttpBackend(f"{root}/v1", "sk-canary/0011", "m")
        with pytest.raises(ChatError, match=r"you sent \*\*\* to us"):
            await backend.reply(request)
        await backend.close()
        control = Control(root, "sk-canary/0011")
        with pytest.raises(EngineError, match=r"you sent \*\*\* to us"):
            await control.models()
        await control.close()


async def test_events_cut_anywhere_are_read_whole_and_in_time() -> None:
    """A line of 8 MB, which comes in pieces of 64 KiB, is put together once."""
    data = (
        b'data: {"choices": [{"index": 0, "delta": {"content": "'
        + b"x" * (8 << 20)
        + b'"}, "finish_reason": "stop"}]}\n\n'
    )
    request = Request(model="m", messages=[{"role": "user", "content": "x"}], sampling=Sampling(), is_stream=True)
    async with answering(200, "Content-Type: text/event-stream\r\n", data + b"data: [DONE]\n\n") as root:
        backend = HttpBackend(f"{root}/v1", "key", "m")
        [chunk] = [chunk async for chunk in backend.stream(request)]
        await backend.close()
    assert len(chunk.choice.text) == 8 << 20
