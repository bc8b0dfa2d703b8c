"""A proxy that loses the answers to its first connection: what an SDK sees of a network that breaks."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Swallowing:
    """Passes on nothing of the answers to its first connection, nor that its client has left.

    With `closes` it ends that connection instead: when the answer has begun, or with `before_asking` at its request,
    which then reaches nobody.
    """

    def __init__(self, upstream: str, *, closes: bool = False, before_asking: bool = False) -> None:
        self._upstream = urlsplit(upstream)
        self._closes = closes
        self._before_asking = before_asking
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._pass(reader, writer)))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = next(self._numbers) == 0
        if is_first and self._before_asking:
            await reader.read(1)
            writer.close()
            return
        answers, upstream = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        asking = asyncio.create_task(_forward(reader, upstream))
        try:
            if is_first and self._closes:
                await answers.read(1)
            else:
                await asyncio.gather(asking, _forward(answers, None if is_first else writer))
        finally:
            asking.cancel()
            for open_end in (upstream, writer):
                open_end.close()


async def _forward(source: asyncio.StreamReader, target: asyncio.StreamWriter | None) -> None:
    while data := await source.read(1 << 16):
        if target is not None:
            target.write(data)
