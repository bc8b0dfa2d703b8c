"""Receives the body of a request: within a number of bytes and of seconds, whatever the client sends."""

import asyncio
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from art_cli.chat.chat_errors import ChatError

BODY_TIMEOUT_S = 60.0  # longest wait for a client to send its whole request
MAX_DISCARDED = 64 * 2**20  # bytes of a refused body that are read only so that the client sees the answer


class BodyLimit(NamedTuple):
    """The largest body of a request, and the reason. Example: BodyLimit(2**20, "no longer prompt fits the context")"""

    num_bytes: int = 32 * 2**20  # enough for a context of a million tokens as text
    reason: str = ""


async def read_body(http: HttpRequest, limit: BodyLimit, timeout_s: float) -> bytes:
    """Returns the whole body. Raises ChatError: too large (413), also by its header alone; too slow (408)."""
    declared = http.headers.get("content-length", "")
    is_over = declared.isdecimal() and int(declared[:20]) > limit.num_bytes
    if is_over and not _must_discard(http):
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in http.stream():
                size += len(piece)
                is_over = is_over or size > limit.num_bytes
                if is_over and (size > MAX_DISCARDED or not _must_discard(http)):
                    raise _too_large(limit)
                if not is_over:
                    pieces.append(piece)
    except TimeoutError:
        raise ChatError(408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout") from None
    if is_over:
        raise _too_large(limit)
    return b"".join(pieces)


def _must_discard(http: HttpRequest) -> bool:
    """Returns whether a body that is refused must be read all the same.

    If the client wants the connection closed, an answer before the body's end resets the connection, and the client
    never sees the answer. A client that expects "100 Continue" has not begun to send.
    """
    closes = http.headers.get("connection", "").lower() == "close" or http.scope["http_version"] == "1.0"
    return closes and "expect" not in http.headers


def _too_large(limit: BodyLimit) -> ChatError:
    reason = f"; {limit.reason}" if limit.reason else ""
    return ChatError(413, f"the body is larger than {limit.num_bytes} bytes{reason}", code="request_too_large")
