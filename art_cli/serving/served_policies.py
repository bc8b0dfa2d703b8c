"""ServedPolicy: one model name, the engine that answers for it, and the change to another checkpoint; Policies: all.

A change drops no request, and no reply mixes two checkpoints: requests in flight end on the checkpoint that they began
with, later ones go to the new one. vLLM does that by itself, because each step's adapter has its own name there. Other
engines exist twice during a change: the new engine is ready before it gets a request, and the old one is closed when
its last request ends. A checkpoint that cannot be loaded changes nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import NoReturn

from art_cli.chat import Backend
from art_cli.engines import Engine
from art_cli.runtime.errors import ArtError, UsageError
from art_cli.serving.loader import Loader
from art_cli.serving.served_model import Source

log = logging.getLogger(__name__)


class _Generation:
    """One engine of a policy, and the number of requests that it is answering."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_requests = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @contextlib.contextmanager
    def lease(self) -> Iterator[Backend]:
        self.num_requests += 1
        self.is_idle.clear()
        try:
            yield self.engine.backend
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self.is_idle.set()

    async def retire(self) -> None:
        """Closes an engine that gets no new requests: when its last request has ended, or at once when cancelled."""
        try:
            await self.is_idle.wait()
        finally:
            try:
                await self.engine.close()
            except ArtError as error:
                log.warning("an engine that was replaced did not close: %s", error)


class ServedPolicy:
    """One model name and the engine that answers for it now."""

    def __init__(self, source: Source, loader: Loader) -> None:
        self.source = source
        self._loader = loader
        self._generation: _Generation | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ArtError: the source cannot be loaded, or not run here."""
        assert self._generation is None, "started twice"
        self._generation = _Generation(await self._loader.make(self.source))

    async def change(self, source: Source) -> None:
        """New requests are answered by `source` once it returns. Raises ArtError; then nothing has changed."""
        old = self._current()
        if self._loader.swaps_adapters:
            if source.adapter is None:
                raise UsageError(f"{source}: vLLM changes adapters; weights as a whole need --engine embedded")
            await old.engine.load(source.adapter.resolve(), source.step)
        else:
            self._generation = _Generation(await self._loader.make(source))
            retiring = asyncio.create_task(old.retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        self.source = source

    def lease(self) -> contextlib.AbstractContextManager[Backend]:
        """Returns the backend that answers now. Its engine stays open until the lease ends, also after a change."""
        return self._current().lease()

    def longest_prompt(self) -> int | None:
        """Returns the number of characters that no prompt exceeds, or None if it is unknown or nothing is loaded."""
        return None if self._generation is None else self._generation.engine.longest_prompt()

    async def watch(self) -> NoReturn:
        """Never returns. Raises EngineError once its engine can answer no more."""
        while True:
            current = self._current()
            watching = asyncio.create_task(current.engine.watch())
            try:
                while not watching.done() and current is self._generation:
                    await asyncio.wait((watching,), timeout=1.0)
                if watching.done() and current is self._generation:
                    watching.result()
            finally:
                watching.cancel()

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        if self._generation is not None:
            await self._generation.engine.close()

    def _current(self) -> _Generation:
        assert self._generation is not None, "not started"
        return self._generation


class Policies:
    """All policies of a service, by name. They are loaded one after the other."""

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
        """Never returns. Raises an ExceptionGroup of EngineErrors once an engine can answer no more."""
        async with asyncio.TaskGroup() as group:
            for policy in self.served.values():
                group.create_task(policy.watch())
        raise AssertionError("watching never ends")

    async def close(self) -> None:
        for policy in self.served.values():
            await policy.close()
