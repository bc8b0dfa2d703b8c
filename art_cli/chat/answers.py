"""Reads an endpoint's answer up to a size. aiohttp decompresses it a piece at a time, so a bomb stops here too."""

import aiohttp

MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens, each with its id and logprob, take 40 MB
MAX_ERROR = 1 << 20  # bytes of an answer that is only repeated in a message


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint answered more than any request asks for."""


async def read_answer(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER) -> bytes:
    """The whole body, decompressed. Raises AnswerTooLarge, and closes the connection, where it is more than `limit`."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            response.close()
            raise AnswerTooLarge(f"the answer is larger than {limit >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)
