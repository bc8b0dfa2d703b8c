"""Support for tests of hostile data: seeded mutations of good bytes, a heartbeat of the event loop, a memory bound.

    for number, data in enumerate(mutations(good, seed=0, count=10_000)): ...      every mutation is reproducible
    async with Heartbeat() as heart: ...; assert heart.longest_s < 0.2             how long the event loop was held
    with MemoryBound(mib=256): ...                                                 growth of this process's peak memory

`NUM_MUTATIONS` is how many mutations a fuzz test plays: few in an ordinary run, 10,000 with `ART_FUZZ=10000`.
"""

import asyncio
import contextlib
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

NUM_MUTATIONS = int(os.environ.get("ART_FUZZ", "150"))

# Values that have broken readers: numbers past every width, text that is no text, nesting, types in the wrong place.
ATOMS = (
    *(
        b"null",
        b"true",
        b"false",
        b"0",
        b"-1",
        b"1.5",
        b"1e308",
        b"-1e308",
        b"1e999",
        b"NaN",
        b"Infinity",
        b"-Infinity",
    ),
    *(b"9" * 400, b"9" * 5_000, b"1" + b"0" * 30, b"2147483648", b"9223372036854775808", b"18446744073709551616"),
    *(b'""', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\\u001b[2J\\u001b[1A"', b'"\\u202e"', b'"\xff\xfe"'),
    *(b"[]", b"{}", b"[[]]", b'{"a": {"b": [null]}}', b'[1, "a", null]', b"'x'", b"[1,]", b'{"a" 1}', b"\x00"),
    *(
        b"[" * 50_000,
        b"[" * 5_000 + b"]" * 5_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b'"' + b"x" * 1_000_000 + b'"',
    ),
)
STARTS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x80\x04\x95", b"PK\x03\x04", b"\x1f\x8b", b"\n\n", b"\x00" * 64)


def mutations(good: bytes, *, seed: int, count: int) -> Iterator[bytes]:
    """`count` damaged versions of `good`: values replaced, bytes changed, cut, doubled, moved, encoded otherwise."""
    draw = random.Random(seed)
    kinds: Sequence[Callable[[random.Random, bytes], bytes]] = (
        *(_replace_value, _replace_value, _replace_value, _rename_key, _flip, _cut, _remove, _repeat, _swap_lines),
        *(_start_otherwise, _encode_otherwise, _insert),
    )
    for _ in range(count):
        data = good
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            data = draw.choice(kinds)(draw, data)
        yield data


def _span_of_value(draw: random.Random, data: bytes) -> tuple[int, int]:
    """Where one value stands: from behind a random colon, bracket or comma to the next comma or bracket."""
    starts = [place + 1 for place, byte in enumerate(data) if byte in b":[,"]
    if not starts:
        return 0, len(data)
    start = draw.choice(starts)
    ends = [place for place in range(start, min(len(data), start + 400)) if data[place] in b",]}\n"]
    return start, draw.choice(ends[:3]) if ends else len(data)


def _replace_value(draw: random.Random, data: bytes) -> bytes:
    start, end = _span_of_value(draw, data)
    return data[:start] + draw.choice(ATOMS) + data[end:]


def _rename_key(draw: random.Random, data: bytes) -> bytes:
    quotes = [place for place, byte in enumerate(data) if byte == ord('"')]
    if not quotes:
        return data
    place = draw.choice(quotes)
    return data[: place + 1] + draw.choice((b"x", b"\xff", b"\\ud800", b"id", b"__class__")) + data[place + 1 :]


def _flip(draw: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 4))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _remove(draw: random.Random, data: bytes) -> bytes:
    start = draw.randrange(len(data) + 1)
    return data[:start] + data[start + draw.choice((1, 2, 16, 200)) :]


def _repeat(draw: random.Random, data: bytes) -> bytes:
    start = draw.randrange(len(data) + 1)
    piece = data[start : start + draw.choice((1, 20, 400))]
    return data[:start] + piece * draw.choice((2, 3, 50)) + data[start + len(piece) :]


def _swap_lines(draw: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    draw.shuffle(lines)
    return b"\n".join(lines)


def _insert(draw: random.Random, data: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice((draw.randbytes(draw.choice((1, 8, 64))), draw.choice(ATOMS))) + data[place:]


def _start_otherwise(draw: random.Random, data: bytes) -> bytes:
    return draw.choice(STARTS) + data


def _encode_otherwise(draw: random.Random, data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode(draw.choice(("utf-16", "utf-16-be", "utf-32", "latin-1")), "replace")


class Heartbeat:
    """Measures the longest time for which this process's computing held the running event loop; `longest_s` in seconds.

    Time for which the processor was another process's is left out, so that a busy machine holds nothing.
    """

    def __init__(self, *, period_s: float = 0.01) -> None:
        self.longest_s = 0.0
        self._period_s = period_s

    async def __aenter__(self) -> "Heartbeat":
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(2 * self._period_s)  # a hold that lasts until here is seen by the next beat
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _beat(self) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        while True:
            await asyncio.sleep(self._period_s)
            wall_now, cpu_now = time.monotonic(), time.process_time()
            self.longest_s = max(self.longest_s, min(wall_now - wall - self._period_s, cpu_now - cpu))
            wall, cpu = wall_now, cpu_now


class MemoryBound:
    """Fails when this process's peak of resident memory grew by more than `mib` MiB inside the block."""

    def __init__(self, *, mib: float) -> None:
        self._mib = mib

    def __enter__(self) -> None:
        self._before = _peak_mib()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        grown = _peak_mib() - self._before
        assert error is not None or grown <= self._mib, (
            f"memory grew by {grown:.0f} MiB, at most {self._mib} are allowed"
        )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def assert_in_words(code: int, stderr: str) -> None:
    """A failed command said in one or few lines what is wrong: no traceback, no 'bug in art', no terminal escapes."""
    assert "Traceback" not in stderr and "bug in art" not in stderr, stderr
    assert "\x1b" not in stderr, repr(stderr)
    assert code in (0, 1, 2), (code, stderr)
    assert code == 0 or stderr.strip(), "a failure without a word"
