"""ServedRun: the policies of a run that answer live traffic, as the engine of `art gateway --follow`.

The promoted checkpoint answers. With a canary, `Canary.share` of the conversations get the candidate instead, each
conversation always the same policy. The run's served.json decides (runs/served.py); a change takes effect within
seconds, drops no request, and mixes no reply. Without served.json the run's best evaluated checkpoint answers. A
checkpoint that cannot be loaded, or a candidate whose engine fails, changes nothing for clients: the promoted policy
answers.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NoReturn

import msgspec

from art_cli.chat import Backend
from art_cli.chat.chat_app import closing_stream
from art_cli.chat.http_server import cancel
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.engines import Endpoint
from art_cli.runs import run_checkpoints
from art_cli.runs.run_checkpoints import Found
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import Canary, Served, read_served
from art_cli.runtime.errors import ArtError, describe, first_of_group
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.served_model import Source, of_checkpoint
from art_cli.serving.served_policies import POLL_S, Loader, ServedPolicy

log = logging.getLogger(__name__)


class ServedRun:
    """An Upstream of the gateway, with the lifecycle of an Engine. `Request.group` is the conversation."""

    def __init__(self, run: RunDir, loader: Loader, *, name: str, base: str | None = None) -> None:
        self._run, self._loader, self._name, self._base = run, loader, name, base
        self._served: Served | None = None
        self._promoted: ServedPolicy
        self._canary: tuple[Canary, ServedPolicy] | None = None
        self._watching: asyncio.Task[NoReturn] | None = None  # of the canary
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def backend(self) -> Backend:
        return self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(base_url=None, api_key="", model=self._name, step=self._promoted.source.step)

    async def start(self) -> None:
        """Raises ArtError if the promoted checkpoint cannot be loaded."""
        self._served = await call_in_thread(read_served, self._run.root)
        self._promoted = ServedPolicy(await call_in_thread(self._source, None), self._loader)
        await self._promoted.start()
        await self._change_canary()

    async def watch(self) -> NoReturn:
        """Follows served.json. Raises EngineError if the engine of the promoted policy fails."""
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                group.create_task(self._promoted.watch())
                group.create_task(self._follow())
        raise AssertionError("watching never ends")

    async def close(self) -> None:
        if self._watching is not None:
            await cancel(self._watching)
        if self._canary is not None:
            await self._canary[1].close()
        await cancel(*self._retiring)
        await self._promoted.close()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self._name]

    async def reply(self, request: Request) -> Reply:
        policy = self._policy_for(request)
        with policy.lease() as backend:
            reply = await backend.reply(msgspec.structs.replace(request, model=self._name))
            reply.policy = await policy.proven.digest(reply.step)
        return reply

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        policy = self._policy_for(request)
        with policy.lease() as backend:
            async with closing_stream(backend.stream(msgspec.structs.replace(request, model=self._name))) as chunks:
                async for chunk in chunks:
                    chunk.policy = await policy.proven.digest(chunk.step)
                    yield chunk

    def _policy_for(self, request: Request) -> ServedPolicy:
        if self._canary is not None and self._canary[0].answers(request.group or ""):
            return self._canary[1]
        return self._promoted

    # --- following ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> NoReturn:
        problem = ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if self._watching is not None and self._watching.done():
                    log.warning("the candidate answers nobody any more: %s", self._watching.exception())
                    await self._drop_canary()
                served = await call_in_thread(read_served, self._run.root)
                if served != self._served:
                    self._served = served
                    await self._change()
                problem = ""
            except Exception as error:  # the boundary to the run's files and the engines
                if (message := describe(error)) != problem:
                    log.warning("%s: stays at step %d: %s", self._name, self._promoted.source.step, message)
                problem = message

    async def _change(self) -> None:
        wanted = None if self._served is None else self._served.canary
        if self._canary is not None and self._canary[0] != wanted:
            await self._drop_canary()
        try:
            source = await call_in_thread(self._source, None)
            if source.adapter != self._promoted.source.adapter or source.step != self._promoted.source.step:
                await self._promoted.change(source)
                log.info("%s: answers from step %d now", self._name, source.step)
        finally:
            await self._change_canary()

    async def _change_canary(self) -> None:
        wanted = None if self._served is None else self._served.canary
        if wanted is None or self._canary is not None:
            return
        try:
            policy = ServedPolicy(await call_in_thread(self._source, wanted), self._loader)
            await policy.start()
        except ArtError as error:
            log.warning("%s: no canary, because the candidate cannot be loaded: %s", self._name, error)
            return
        self._canary, self._watching = (wanted, policy), asyncio.create_task(policy.watch())
        log.info("%s: step %d answers %.0f %% of the conversations", self._name, policy.source.step, wanted.share * 100)

    async def _drop_canary(self) -> None:
        """Sends new calls to the promoted policy. The candidate's engine closes after its last call."""
        if self._canary is None:
            return
        (_, policy), self._canary = self._canary, None
        if self._watching is not None:
            await cancel(self._watching)
            self._watching = None
        retiring = asyncio.create_task(policy.retire())
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def _source(self, canary: Canary | None) -> Source:
        found: Found | None
        if canary is None:
            found = run_checkpoints.choose(self._run, "offered")
        else:
            found = run_checkpoints.find(self._run.root / canary.checkpoint)
        assert found is not None, canary
        run_checkpoints.log_policy(found.path, found.why)
        return of_checkpoint(found, name=self._name, base=self._base)
