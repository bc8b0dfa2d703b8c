"""The limit of one answer, held while httpx reads and decompresses it for litellm.

httpx and litellm read an answer whole, and httpx decompresses each piece whole: 2 MB of gzip become 4 GB. The stream
put in the place of the response's own stops both, and Python's json, before they take memory or seconds.
"""

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from art_cli.chat.endpoint_answers import AnswerTooLarge
from art_cli.judges.providers import ENCODINGS, MAX_BYTES, MAX_MARKS

_PIECE = 1 << 16


def limit_transport(transport: Any) -> Any:
    """Returns the same httpx transport with its answers limited. Its class stays, because litellm reads it."""
    handle = transport.handle_async_request

    async def handle_async_request(request: httpx.Request) -> httpx.Response:
        request.headers["Accept-Encoding"] = ENCODINGS
        response: httpx.Response = await handle(request)
        encoding = response.headers.pop("content-encoding", "identity").strip().lower()
        response.headers.pop("content-length", None)  # the length of the compressed body
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Limited(response.stream, encoding)
        return response

    transport.handle_async_request = handle_async_request
    return transport


def find_too_large(error: BaseException | None) -> AnswerTooLarge | None:
    """Returns the AnswerTooLarge among the causes of an error, in which clients wrap it, or None."""
    seen = 0
    while error is not None and not isinstance(error, AnswerTooLarge) and seen < 20:
        error, seen = error.__cause__ or error.__context__, seen + 1
    return error if isinstance(error, AnswerTooLarge) else None


class _Limited(httpx.AsyncByteStream):
    """Another stream's bytes, decompressed, up to the limits. Raises AnswerTooLarge, httpx.DecodingError."""

    def __init__(self, stream: httpx.AsyncByteStream, encoding: str) -> None:
        self._stream, self._encoding = stream, encoding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        inflate = _make_inflater(self._encoding)
        num_read = num_bytes = num_marks = 0
        async for data in self._stream:
            num_read += len(data)
            if num_read > MAX_BYTES:
                raise AnswerTooLarge(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            for piece in inflate(data):
                num_bytes += len(piece)
                num_marks += sum(map(piece.count, (b"[", b"{", b",")))
                if num_bytes > MAX_BYTES:
                    raise AnswerTooLarge(f"the answer is larger than {MAX_BYTES >> 20} MiB")
                if num_marks > MAX_MARKS:
                    raise AnswerTooLarge(f"the answer has more than {MAX_MARKS:,} brackets and commas")
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _make_inflater(encoding: str) -> Any:
    """Returns a function from a piece of the answer to small pieces of its text."""
    if encoding in ("", "identity"):
        return lambda data: (data,)
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Inflater().pieces
    raise httpx.DecodingError(f"content-encoding {encoding[:20]!r} was not asked for")


class _Inflater:
    """Undoes gzip (of several members, too), zlib, and deflate without a header."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by the header
        self._is_first = True

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields at most 64 KiB each, so that the reader can stop between them."""
        while data:
            try:
                piece = self._zlib.decompress(data, _PIECE)
            except zlib.error as error:
                if not self._is_first:
                    raise httpx.DecodingError(f"the answer cannot be decompressed: {error}") from error
                self._zlib, self._is_first = zlib.decompressobj(-zlib.MAX_WBITS), False
                continue
            self._is_first = False
            yield piece
            data = self._zlib.unconsumed_tail
            if self._zlib.eof:
                data = self._zlib.unused_data
                self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 32)
