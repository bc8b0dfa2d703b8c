"""Reading of requests off the event loop: JSON within bounds, and calls in threads within a time.

What is bounded here is what holds the interpreter while it runs: C code that makes many objects of a body at once lets
no other thread run, so a body may only have so many values, whatever its length.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from art_cli.chat.errors import ChatError, invalid
from art_cli.threads import Crew, Crowded, Overran

Json = dict[str, Any]
Result = TypeVar("Result")

NUM_THREADS = 2  # that read requests at once, where the tokenizer is part of it, which lets others run
WAIT_S = 60.0  # longest wait for one of them
READ_S = 20.0  # longest time in one of them; a million tokens of prompt take 5
MAX_DEPTH = 64  # of nested JSON; a tool's schema nests 10 to 20 deep
MAX_NODES = 100_000  # brackets and colons of a body outside its strings; so many objects take 0.05 s to make
MAX_VALUES = 2_000_000  # commas outside its strings: token ids of a prompt; so many take 0.1 s
_SLICE = 2**20
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class RequestReader:
    """Runs what a request costs before it is sampled: parsing, the chat template, the tokenizer."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._crew = Crew(size=num_threads, wait_s=WAIT_S, run_s=READ_S)

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of the function. Raises ChatError: 400 where it takes too long, 503 where too much waits."""
        try:
            return await self._crew.call(function, *arguments)
        except Overran:
            raise invalid(f"the request takes more than {READ_S:.0f} s to read; shorten it") from None
        except Crowded:
            raise ChatError(503, "too many requests are being read; try again later", retry_after="5") from None


def decode_object(body: bytes) -> Json:
    """The fields of a JSON object. Raises ChatError 400: it is none, or is nested or divided beyond the bounds."""
    check_size(body)
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own errors and UnicodeDecodeError are ValueErrors
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and is_deep(fields):
        raise invalid(f"the body is nested more than {MAX_DEPTH} deep")
    return fields


def convert(fields: Json, kind: type[Result]) -> Result:
    """The fields as a msgspec.Struct. Raises ChatError 400 that names the first field that does not fit."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
            param, message = f"{param}.{missing[1]}".removeprefix("."), "required"
        raise invalid(f"{param}: {message}", param) from None


def check_size(body: bytes, what: str = "the body", param: str | None = None) -> None:
    """Raises ChatError 400: this JSON has more values than are read."""
    if _is_within(body, [(0, len(body))]) or _is_within(body, _outside_strings(body)):
        return
    bounds = f"{MAX_NODES:,} lists, objects and keys, or more than {MAX_VALUES:,} values"
    raise invalid(f"{what} has more than {bounds}", param)


def _outside_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Where there are no strings, as places of beginning and end."""
    place = 0
    for string in _STRING.finditer(body):
        yield place, string.start()
        place = string.end()
    yield place, len(body)


def _is_within(body: bytes, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether these spans of a body hold no more brackets, colons and commas than may be."""
    num_nodes = num_commas = 0
    for begin, end in spans:
        for start in range(begin, end, _SLICE):  # counting holds the interpreter, too
            piece = body[start : min(end, start + _SLICE)]
            num_nodes += piece.count(b"{") + piece.count(b"[") + piece.count(b":")
            num_commas += piece.count(b",")
            if num_nodes > MAX_NODES or num_commas > MAX_VALUES:
                return False
    return True


def is_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
