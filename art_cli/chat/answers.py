"""Reads an endpoint's answer up to a size. aiohttp decompresses it in pieces, so that a bomb is stopped as well."""

import aiohttp

MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens with ids and logprobs take 40 MB
MAX_ERROR = 1 << 20  # bytes of an error answer, which is only quoted in a message


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint's answer is larger than any request asks for."""


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
