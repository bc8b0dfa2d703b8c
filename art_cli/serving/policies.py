"""ServedPolicy: one model name, what answers for it, and the change to another checkpoint; Policies: all names served.

A change drops no request, and no reply is of two checkpoints: what is in flight ends on the one it began with, what
comes after goes to the new one. vLLM does that itself, with an adapter's name for each step. Engines in this process
are doubled for the change: the new one is ready before anything goes to it, the old one goes when its last request
ends. A checkpoint that cannot be loaded changes nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NoReturn

from art_cli.chat import Backend
from art_cli.chat.app import closing_stream
from art_cli.chat.errors import ChatError
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, with_defaults
from art_cli.engines import Engine
from art_cli.errors import ArtError, UsageError
from art_cli.serving.loader import Loader
from art_cli.serving.source import Source

log = logging.getLogger(__name__)


class _Shift:
    """An engine and the requests it is answering."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_requests = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @contextlib.contextmanager
    def working(self) -> Iterator[Backend]:
        self.num_requests += 1
        self.is_idle.clear()
        try:
            yield self.engine.backend
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self.is_idle.set()


class ServedPolicy:
    """Backend of one name."""

    def __init__(self, source: Source, loader: Loader) -> None:
        self.source = source
        self._loader = loader
        self._shift: _Shift | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ArtError: the source cannot be loaded, or not run here."""
        assert self._shift is None, "started twice"
        self._shift = _Shift(await self._loader.make(self.source))

    async def change(self, source: Source) -> None:
        """From when it returns, new requests are answered by `source`. Raises ArtError: it cannot; nothing changed."""
        shift = self._working_shift()
        if self._loader.swaps_adapters:
            if source.adapter is None:
                raise UsageError(f"{source}: vLLM changes adapters; weights as a whole need --engine embedded")
            await shift.engine.load(source.adapter.resolve(), source.step)
        else:
            self._shift = _Shift(await self._loader.make(source))
            retiring = asyncio.create_task(_retire(shift))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        self.source = source

    async def watch(self) -> NoReturn:
        """Returns never: raises EngineError once its engine can answer no more."""
        while True:
            shift = self._working_shift()
            watching = asyncio.create_task(shift.engine.watch())
            try:
                while not watching.done() and shift is self._shift:
                    await asyncio.wait((watching,), timeout=1.0)
                if watching.done() and shift is self._shift:
                    watching.result()
            finally:
                watching.cancel()

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        if self._shift is not None:
            await self._shift.engine.close()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self.source.name]

    async def reply(self, request: Request) -> Reply:
        request = with_defaults(request, self.source.defaults)
        with self._working_shift().working() as backend:
            return await backend.reply(request)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        request = with_defaults(request, self.source.defaults)
        with self._working_shift().working() as backend:
            async with closing_stream(backend.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _working_shift(self) -> _Shift:
        assert self._shift is not None, "not started"
        return self._shift


async def _retire(shift: _Shift) -> None:
    """Closes an engine that gets no new requests, when its last one has ended, or at once when cancelled."""
    try:
        await shift.is_idle.wait()
    finally:
        try:
            await shift.engine.close()
        except ArtError as error:
            log.warning("an engine that was replaced did not close: %s", error)


class Policies:
    """Backend of all names. They are loaded one after the other."""

    def __init__(self, served: Sequence[ServedPolicy]) -> None:
        names = [policy.source.name for policy in served]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{', '.join(doubled)}: served twice; give names: a={doubled[0]} b=...")
        self.served = {policy.source.name: policy for policy in served}

    async def start(self) -> None:
        for policy in self.served.values():
            await policy.start()
            log.info("loaded %s", policy.source)

    async def watch(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            for policy in self.served.values():
                group.create_task(policy.watch())
        raise AssertionError("watching never ends")

    async def close(self) -> None:
        for policy in self.served.values():
            await policy.close()

    def models(self) -> list[str]:
        return list(self.served)

    async def reply(self, request: Request) -> Reply:
        return await self._policy(request).reply(request)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        async with closing_stream(self._policy(request).stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _policy(self, request: Request) -> ServedPolicy:
        if request.model not in self.served:
            raise ChatError(404, f"the model {request.model!r} does not exist", param="model", code="model_not_found")
        return self.served[request.model]
