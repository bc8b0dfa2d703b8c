"""SharedServer: a vLLM server, and the engines that sample from it, each from its own adapters.

The first engine starts the server and the last engine stops it. A server that dies is started once more, and the
engines load their adapters again. If the second server also dies, all engines fail.

Traffic decides which requests may be in the server together. On a CPU vLLM 0.32 crashes on a LoRA batch with prompt
logprobs and another request: logits for all prompt tokens meet a mapping with one row per request
("einsum(): subscript b"). So on a CPU prompts are scored alone. Traffic can go when
https://github.com/vllm-project/vllm/issues/16668 is closed.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec

from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines.vllm import arguments
from art_cli.engines.vllm.vllm_server import OwnServer, RunningServer
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.run_memory import ADAPTERS
from art_cli.runtime.errors import EngineError

log = logging.getLogger(__name__)

MAX_RESTARTS = 1


class Member(Protocol):
    """An engine of the server."""

    async def attach(self) -> None:
        """Loads the engine's adapter into a server that has just started, or that other engines use already."""

    async def detach(self) -> None:
        """Lets requests wait, because the server is gone."""

    def fail(self, message: str) -> None:
        """Records that the engine never answers again."""


class Traffic:
    """Admits requests in arrival order, some sharing the server and some alone in it."""

    def __init__(self) -> None:
        self._entering = asyncio.Lock()  # fair
        self._num_shared = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._entering:
            self._num_shared += 1
            self._is_empty.clear()
        try:
            yield
        finally:
            self._num_shared -= 1
            if not self._num_shared:
                self._is_empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._entering:
            await self._is_empty.wait()
            yield


class SharedServer:
    """Example: SharedServer(config, policy_spec, name="shop", logs=Path("logs"))"""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, name: str, logs: Path) -> None:
        """Raises EngineError if the Python is missing or this machine does not support a setting."""
        self.process: OwnServer | RunningServer
        if config.base_url is None:
            self.process = OwnServer(config, model, name=name, log=logs / "vllm.log")
        else:
            self.process = RunningServer(config, config.base_url)
        self.traffic = Traffic()
        self.may_restart = asyncio.Event()
        self.may_restart.set()
        self.adapter_names: set[str] = set()  # all names used in the server so far
        self._config, self._model = config, model
        self._members: list[Member] = []
        self._changing = asyncio.Lock()  # held while the server starts, and while engines load into it
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_own(self) -> bool:
        return isinstance(self.process, OwnServer)

    def has_room_for(self, model: PolicySpec) -> bool:
        """Returns True if one more engine for this policy fits, with a free adapter slot for its checkpoint changes."""
        slots = arguments.user_args(self._config).get("max-loras", ADAPTERS)
        is_same = msgspec.structs.replace(model, lora_rank=self._model.lora_rank) == self._model
        is_small = arguments.rank_slot(model) <= arguments.rank_slot(self._model)
        has_slots = isinstance(slots, int) and ADAPTERS * (len(self._members) + 1) <= slots
        return self.is_own and not self._is_closed and is_same and is_small and has_slots

    async def join(self, member: Member) -> None:
        """Attaches an engine, and starts the server for the first engine. Raises ArtError; then nothing changes."""
        async with self._changing:
            if self._is_closed:
                raise EngineError("vllm: the server was closed")
            try:
                if not self._members:
                    await self._start()
                await member.attach()
            except BaseException:
                if not self._members:
                    await self.process.stop()
                raise
            self._members.append(member)
            if self._watcher is None:
                self._watcher = asyncio.create_task(self._watch())

    async def leave(self, member: Member) -> bool:
        """Returns True for the last engine. The caller then stops the server."""
        if member in self._members:
            self._members.remove(member)
        if self._members:
            return False
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
            self._watcher = None
        return True

    async def _start(self) -> None:
        self.adapter_names = set()
        await self.process.start()

    async def _watch(self) -> None:
        """Restarts the server after its death, up to MAX_RESTARTS times."""
        try:
            for number in range(MAX_RESTARTS + 1):
                reason = await self.process.ended()
                async with self._changing:
                    await self._restart(reason, is_last=number == MAX_RESTARTS)
        except Exception as error:  # the boundary of this task: everybody waiting for the server must get the error
            for member in self._members:
                member.fail(_message(error))

    async def _restart(self, reason: str, *, is_last: bool) -> None:
        for member in list(self._members):
            await member.detach()
        message = f"vllm: the server ended ({reason}); {self.process.last_lines()}"
        await self.process.stop()
        if is_last:
            raise EngineError(message)
        for line in (*message.splitlines(), "it is started once more"):
            log.warning("%s", line)
        await self.may_restart.wait()
        await self._start()
        for member in list(self._members):
            try:
                await member.attach()
            except Exception as error:  # the boundary to an engine's files: other engines continue
                member.fail(_message(error))
        log.warning("vllm: the server answers again")


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"vllm: {type(error).__name__}: {error}"
