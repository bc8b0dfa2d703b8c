"""Reads request bodies with size and time limits, and parses JSON with limits, off the event loop.

`read_body` limits the bytes and seconds of a body. RequestReader parses it in a thread. C code that creates a large
number of objects holds the GIL and blocks all other threads, including the event loop. The number of values in a body
is therefore limited independently of its length, and bodies are scanned in slices.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.runtime.processes.plain_json import MAX_CHAT_DEPTH, is_deep
from art_cli.runtime.worker_pool import Crowded, Overran, WorkerPool

Json = dict[str, Any]
Result = TypeVar("Result")

BODY_TIMEOUT_S = 60.0  # longest wait for a client to send its whole request
MAX_DISCARDED = 64 * 2**20  # bytes of a refused body that are discarded so that the client can read the answer
WAIT_S = 60.0  # longest wait for the reading thread
READ_S = 20.0  # longest time to parse a request; a prompt of a million tokens takes 5 s
MAX_NODES = 50_000  # brackets and colons outside of strings; creating this many objects takes 0.03 s
MAX_VALUES = 1_200_000  # commas outside a body's strings, as between a million token ids; making them takes 0.06 s
_SLICE = 2**20  # bytes per scan
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class BodyLimit(NamedTuple):
    """The maximum body size and its reason. Example: BodyLimit(2**20, "no longer prompt fits the context")"""

    num_bytes: int = 32 * 2**20  # enough for a context of a million tokens as text
    reason: str = ""


async def read_body(http: HttpRequest, limit: BodyLimit, timeout_s: float) -> bytes:
    """Returns the complete body. Raises ChatError 413 for a large body, also by its header, 408 for a slow one, and 415
    for a compressed one.
    """
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
    if (coding := http.headers.get("content-encoding", "identity")) != "identity":
        message = f"Content-Encoding: {coding[:80]!r} cannot be read here; send the body as it is"
        raise ChatError(415, message, code="unsupported_media_type")
    return b"".join(pieces)


def _must_discard(http: HttpRequest) -> bool:
    """Returns whether a refused body must still be read.

    If the client requested to close the connection, an early answer would reset the connection and the client would not
    see the answer. A client that expects "100 Continue" has not sent the body yet.
    """
    closes = http.headers.get("connection", "").lower() == "close" or http.scope["http_version"] == "1.0"
    return closes and "expect" not in http.headers


def _too_large(limit: BodyLimit) -> ChatError:
    reason = f"; {limit.reason}" if limit.reason else ""
    return ChatError(413, f"the body is larger than {limit.num_bytes} bytes{reason}", code="request_too_large")


class RequestReader:
    """Parses and renders requests in a single thread, because more threads would compete for the GIL."""

    def __init__(self) -> None:
        self._workers = WorkerPool(size=1, wait_s=WAIT_S, run_s=READ_S, max_abandoned=2)

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Returns the function's result. Raises ChatError: 400 if it takes too long, 503 if too many calls wait."""
        try:
            return await self._workers.call(function, *arguments)
        except Overran:
            raise invalid(f"the request takes more than {READ_S:.0f} s to read; shorten it") from None
        except Crowded:
            raise ChatError(503, "too many requests are being read; try again later", retry_after="5") from None


def decode_object(body: bytes) -> Json:
    """Returns a JSON object's fields. Raises ChatError 400 for other types, deep nesting, or too many values."""
    check_size(body)
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own errors and UnicodeDecodeError are ValueErrors
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_CHAT_DEPTH and is_deep(fields, MAX_CHAT_DEPTH):
        raise invalid(f"the body is nested more than {MAX_CHAT_DEPTH} deep")
    return fields


def convert(fields: Json, kind: type[Result], *, strict: bool = True) -> Result:
    """Converts the fields to a msgspec.Struct. Raises ChatError 400 with the first invalid field's name."""
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
            param, message = f"{param}.{missing[1]}".removeprefix("."), "required"
        raise invalid(f"{param}: {message}", param) from None


def check_size(body: bytes, what: str = "the body", param: str | None = None) -> None:
    """Raises ChatError 400 if the JSON has too many values."""
    if _is_within(body, [(0, len(body))]) or _is_within(body, _outside_strings(body)):
        return
    bounds = f"{MAX_NODES:,} lists, objects and keys, or more than {MAX_VALUES:,} values"
    raise invalid(f"{what} has more than {bounds}", param)


def _outside_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yields the start and end of each span between strings."""
    start = 0
    while (quote := body.find(b'"', start)) >= 0:
        yield start, quote
        start = _end_of_string(body, quote + 1)
    yield start, len(body)


def _end_of_string(body: bytes, start: int) -> int:
    """Returns the index after the string's closing quote, or the body's end. A slice never splits an escape."""
    while start < len(body):
        found = _IN_STRING.match(body, start, start + _SLICE)
        end = start if found is None else found.end()
        if body[end : end + 1] == b'"':
            return end + 1
        if end == start:  # the body ends in a backslash
            break
        start = end
    return len(body)


def _is_within(body: bytes, spans: Iterable[tuple[int, int]]) -> bool:
    """Returns whether the brackets, colons, and commas of these spans are within the limits."""
    num_nodes = num_commas = 0
    for begin, end in spans:
        for start in range(begin, end, _SLICE):
            piece = body[start : min(end, start + _SLICE)]
            num_nodes += piece.count(b"{") + piece.count(b"[") + piece.count(b":")
            num_commas += piece.count(b",")
            if num_nodes > MAX_NODES or num_commas > MAX_VALUES:
                return False
    return True
