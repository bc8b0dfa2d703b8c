"""Opens sessions to endpoints and reads their answers up to a size.

aiohttp decompresses an answer in pieces, so that a bomb is stopped as well.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine
IDLE_S = 4.0  # below uvicorn's keep-alive of 5 s, so that this side closes idle connections, never both at once
MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens with ids and logprobs take 40 MB
MAX_ERROR = 1 << 20  # bytes of an error answer, which is only quoted in a message


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint's answer is larger than any request asks for."""


def open_session(url: str, headers: Mapping[str, str], **more: Any) -> aiohttp.ClientSession:
    """A session to the endpoint. The environment's proxies are for hosted models, not for this machine."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=URL(url).host not in LOCAL, **more)


async def read_answer(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER) -> bytes:
    """The whole body, decompressed. Raises AnswerTooLarge, and closes the connection, if it exceeds `limit` bytes."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            response.close()
            raise AnswerTooLarge(f"the answer is larger than {limit >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)
