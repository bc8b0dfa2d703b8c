"""BackendService: one base model on a port, from its loading to the last request.

    load -> listen -> ... -> stopping: what runs is ended, what waits fails, nothing is saved half -> closed

SIGTERM and SIGINT stop it; a second signal does not wait for what runs.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from art_cli.chat.api_keys import Keys
from art_cli.chat.http_server import serve
from art_cli.config.schema import EngineConfig
from art_cli.runtime import signals
from art_cli.runtime.errors import ArtError
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.stopping import Stopping
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.checkpoint_store import Store
from art_cli.tinker.server.futures import Futures
from art_cli.tinker.server.hosts import make_host
from art_cli.tinker.server.models import Models
from art_cli.tinker.server.samplers import Samplers
from art_cli.tinker.server.state import BackendState
from art_cli.tinker.server.tinker_app import build_app

log = logging.getLogger(__name__)

CHECK_S = 2.0  # time between two looks whether the learner's processes live
SWEEP_S = 30.0  # time between two looks for sessions and checkpoints whose time is over


class BackendService:
    def __init__(
        self, base: Base, *, root: Path, engine: EngineConfig, keys: Keys, limits: BackendLimits, logs: Path
    ) -> None:
        weights = base.weights
        self.base, self.limits, self._logs = base, limits, logs
        self.futures = Futures(pending=limits.pending, pending_bytes=limits.pending_bytes)
        store = Store(root, base=weights.base, dtype=weights.dtype_name, quota=limits.quota_bytes)
        self.host = make_host(base, engine, limits, logs)
        self.samplers = Samplers(base, store, self.host, limits)
        self.models = Models(base, store, self.samplers, self.futures, limits)
        self.state = BackendState(base, store, self.models, self.samplers, self.futures, limits)
        self.app = build_app(self.state, keys)
        self.stopping = Stopping(limits.drain_s, refuse=lambda: None, num_running=lambda: self.futures.num_open)

    async def run(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serves until a signal; `on_ready` gets the root, `http://127.0.0.1:8100`.

        Raises EngineError if the address is not available, or the engine does not start or ended for good.
        """
        try:
            await call_in_thread(self.base.start, self._logs)
            await self.host.start()
            async with serve(self.app, host, port, grace_s=1) as root:
                with signals.calling(self.stopping.stop):
                    try:
                        on_ready(root)
                        await self.stopping.ends_before(self._watch())
                    finally:
                        await self.futures.close()
                        await self.stopping.drain(self.models.close())
        finally:
            await self.samplers.close()
            await call_in_thread(self.base.close)

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self.host.watch(), self._watch_learner(), self._sweep()):
                group.create_task(work)

    async def _watch_learner(self) -> NoReturn:
        """Raises LearnerError if a process of the learner is dead, and the adapters in training with it."""
        while True:
            await call_in_thread(self.base.check_alive)
            await asyncio.sleep(CHECK_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                for session in self.state.sessions.expired():
                    log.info("session %s sent nothing for %g s; its models go", session.id, self.limits.session_s)
                    await self.state.end(session)
                await call_in_thread(self.state.store.sweep)
            except (OSError, ArtError) as error:
                log.warning("what expired cannot be deleted: %s", error)
