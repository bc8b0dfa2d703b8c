"""Adapters: which adapter a server samples from, under which name, and when an old one is unloaded.

Every adapter gets a name that no other one ever had in that server (`policy@0007`). vLLM keys its prefix cache by the
name, so a request never gets keys and values of other weights. A request keeps the adapter that it began with. An
adapter that was replaced is unloaded when its last request has ended.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from art_cli.chat.client import HttpBackend
from art_cli.engines.vllm.control import Control
from art_cli.runtime.errors import CheckpointError, EngineError

log = logging.getLogger(__name__)

FILES = ("adapter_config.json", "adapter_model.safetensors")
MakeBackend = Callable[[str, int], HttpBackend]  # (name in the server, step) -> the client that samples from it


class Adapter:
    """One name in the server, and how many requests use it."""

    def __init__(self, name: str, backend: HttpBackend, *, is_base: bool = False) -> None:
        self.name, self.backend, self.is_base = name, backend, is_base
        self.num_requests = 0


class Adapters:
    """The adapters of one server: the base model at first, then the adapter of each `load`."""

    def __init__(self, control: Control, make_backend: MakeBackend, *, base: str, prefix: str, step: int) -> None:
        """`base` is the base model's name in the server, `prefix` the beginning of the adapters' names."""
        self.control = control
        self.current = Adapter(base, make_backend(base, step), is_base=True)
        self._make_backend, self._prefix = make_backend, prefix
        self._names: set[str] = set()  # names given so far
        self._alive = {self.current}
        self._ends: set[asyncio.Task[None]] = set()  # adapters that are being unloaded

    @property
    def num_requests(self) -> int:
        return sum(adapter.num_requests for adapter in self._alive)

    async def load(self, path: Path, step: int) -> None:
        """Requests from now on use the adapter at `path`. Raises CheckpointError: none there; EngineError: refused."""
        path = path.resolve()
        if missing := [name for name in FILES if not (path / name).is_file()]:
            raise CheckpointError(f"{path}: no {missing[0]}: not a LoRA adapter, and vLLM swaps adapters only")
        name = self._new_name(step)
        await self.control.load_adapter(name, path)
        old, self.current = self.current, Adapter(name, self._make_backend(name, step))
        self._alive.add(self.current)
        self._end_unused(old)

    @contextlib.contextmanager
    def lease(self) -> Iterator[HttpBackend]:
        """The client of the current adapter, which is not unloaded while the request lasts."""
        adapter = self.current
        adapter.num_requests += 1
        try:
            yield adapter.backend
        finally:
            adapter.num_requests -= 1
            self._end_unused(adapter)

    async def close(self, *, unload: bool) -> None:
        """Cancels the requests in flight. `unload` is for a server that lives on, which is left as it was found."""
        await asyncio.gather(*self._ends)
        for adapter in list(self._alive):
            await self._end(adapter, unload=unload)

    def _new_name(self, step: int) -> str:
        """`policy@0007`; `policy@0007.2` for a second adapter of that step."""
        name = plain = f"{self._prefix}@{step:04d}"
        number = 2
        while name in self._names:
            name = f"{plain}.{number}"
            number += 1
        self._names.add(name)
        return name

    def _end_unused(self, adapter: Adapter) -> None:
        if adapter is not self.current and adapter.num_requests == 0 and adapter in self._alive:
            task = asyncio.get_running_loop().create_task(self._end(adapter, unload=True))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _end(self, adapter: Adapter, *, unload: bool) -> None:
        """Unloads an adapter. One that stays loaded costs memory and no more, so a refusal is logged and not raised."""
        self._alive.discard(adapter)
        await adapter.backend.close()
        if unload and not adapter.is_base:
            try:
                await self.control.unload_adapter(adapter.name)
            except EngineError as error:
                log.info("%s was not unloaded: %s", adapter.name, error)
