"""Opens sessions to endpoints and reads their answers up to a size.

aiohttp decompresses an answer in pieces, so that a bomb is stopped as well.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from yarl import URL

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine
IDLE_S = 4.0  # below uvicorn's keep-alive of 5 s, so that this side closes idle connections, never both at once
MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens with ids and logprobs take 40 MB
MAX_ERROR = 1 << 20  # bytes of an error answer, which is only quoted in a message


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint's answer is larger than any request asks for."""


class ErrorAnswer(msgspec.Struct):
    """The parts of an endpoint's error."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None


def open_session(url: str, headers: Mapping[str, str], **more: Any) -> aiohttp.ClientSession:
    """Returns a session to the endpoint. The environment's proxies are for hosted models, not for this machine."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=URL(url).host not in LOCAL, **more)


async def read_answer(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER) -> bytes:
    """Returns the whole body, decompressed. Raises AnswerTooLarge and closes the connection beyond `limit` bytes."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            response.close()
            raise AnswerTooLarge(f"the answer is larger than {limit >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)


def read_error(answer: bytes) -> ErrorAnswer:
    """Returns the error of an OpenAI body, vLLM's older flat body, or FastAPI's `detail`; empty for other answers."""
    try:
        fields = msgspec.json.decode(answer)
        error = fields.get("error", fields) if isinstance(fields, dict) else {}
        error = {"message": error} if isinstance(error, str) else error
        texts = {n: error.get(n) for n in ("message", "type", "param", "code")}
        texts["message"] = texts["message"] or error.get("detail")
    except (ValueError, RecursionError, AttributeError):
        return ErrorAnswer()
    return ErrorAnswer(**{name: str(value) for name, value in texts.items() if value is not None})
