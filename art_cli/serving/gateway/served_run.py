"""ServedRun: the policies of a run that answer live traffic, as the engine of `art gateway --follow`.

The promoted checkpoint answers. With a canary, `Canary.share` of the conversations get the candidate instead, each
conversation always the same policy. The run's served.json decides (runs/served.py); a change takes effect within
seconds, drops no request, and mixes no reply. Without served.json the run's best evaluated checkpoint answers.

The engine of a promoted candidate goes on, and answers all conversations. A checkpoint that cannot be loaded is tried
again after RETRY_S, and so is a candidate whose engine has failed; until then the promoted policy answers.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, NoReturn

import msgspec

from art_cli.chat import Backend
from art_cli.chat.http_server import cancel
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.engines import Endpoint
from art_cli.runs import run_checkpoints
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import Canary, Served, read_served
from art_cli.runtime.errors import CheckpointError, describe
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.served_model import Source, of_checkpoint
from art_cli.serving.served_policies import POLL_S, Loader, ServedPolicy

log = logging.getLogger(__name__)

RETRY_S = 60.0


class _Arm(NamedTuple):
    """A policy with a started engine, and the task that watches the engine."""

    policy: ServedPolicy
    watching: asyncio.Task[NoReturn]


class ServedRun:
    """An Upstream of the gateway, with the lifecycle of an Engine. `Request.group` is the conversation."""

    def __init__(self, run: RunDir, loader: Loader, *, name: str) -> None:
        self._run, self._loader, self._name = run, loader, name
        # base and context of the first adapter, so that nights with another base share its memory
        self._first: Source | None = None
        self._served: Served | None = None  # as followed so far
        self._promoted: _Arm
        self._candidate: tuple[Canary, _Arm] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def backend(self) -> Backend:
        return self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(base_url=None, api_key="", model=self._name, step=self._promoted.policy.source.step)

    async def start(self) -> None:
        """Raises ArtError if the promoted checkpoint cannot be loaded."""
        served = await call_in_thread(read_served, self._run.root)
        self._promoted = await self._start(None if served is None else served.checkpoint)
        try:
            await self._start_candidate(served)
        except Exception as error:  # the boundary to the candidate's files and engine
            log.warning("%s: no canary, and tried again: %s", self._name, describe(error))
        except asyncio.CancelledError:
            await self.close()
            raise
        else:
            self._served = served

    async def watch(self) -> NoReturn:
        """Follows served.json. Raises EngineError if the engine of the promoted policy fails."""
        failed, retry_at, problem = self._served, 0.0, ""
        while True:
            await asyncio.wait((self._promoted.watching,), timeout=POLL_S)
            if self._promoted.watching.done():
                self._promoted.watching.result()
            try:
                if self._drop_failed():  # its engine is started again, and not at once
                    failed, self._served, retry_at = self._served, None, time.monotonic() + RETRY_S
                served = await call_in_thread(read_served, self._run.root)
                if served == self._served or (served == failed and time.monotonic() < retry_at):
                    continue
                failed, retry_at = served, time.monotonic() + RETRY_S
                await self._change(served)
                self._served, problem = served, ""
            except Exception as error:  # the boundary to the run's files and the engines
                if (message := describe(error)) != problem:
                    step = self._promoted.policy.source.step
                    log.warning("%s: stays at step %d, and tries again: %s", self._name, step, message)
                problem = message

    async def close(self) -> None:
        arms = [self._promoted, *([] if self._candidate is None else [self._candidate[1]])]
        await cancel(*(arm.watching for arm in arms), *self._retiring)
        try:
            for arm in arms[1:]:
                await arm.policy.close()
        finally:
            await self._promoted.policy.close()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self._name]

    async def reply(self, request: Request) -> Reply:
        policy = self._policy_for(request)
        with policy.lease() as backend:
            reply = await backend.reply(msgspec.structs.replace(request, model=self._name))
            reply.policy = await policy.proven.digest(reply.step)
        return reply

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        policy = self._policy_for(request)
        with policy.lease() as backend:
            async with aclosing(backend.stream(msgspec.structs.replace(request, model=self._name))) as chunks:
                async for chunk in chunks:
                    chunk.policy = await policy.proven.digest(chunk.step)
                    yield chunk

    def _policy_for(self, request: Request) -> ServedPolicy:
        """Calls without a conversation are not recorded. They get the promoted policy."""
        if self._candidate is None or request.group is None:
            return self._promoted.policy
        canary, arm = self._candidate
        is_on_trial = canary.answers(request.group) and not arm.watching.done()
        return (arm if is_on_trial else self._promoted).policy

    # --- following ----------------------------------------------------------------------------------------------------

    async def _change(self, served: Served | None) -> None:
        """Raises an error for a checkpoint that cannot be loaded."""
        if self._candidate is not None and (served is None or self._candidate[0] != served.canary):
            (canary, arm), self._candidate = self._candidate, None
            is_promoted = served is not None and (served.checkpoint, served.policy) == (
                canary.checkpoint,
                canary.policy,
            )
            if is_promoted and not arm.watching.done():
                self._promoted, arm = arm, self._promoted
                log.info("%s: answers from step %d now", self._name, self._promoted.policy.source.step)
            self._retire(arm)
        promoted = self._promoted.policy
        source = await call_in_thread(self._source, None if served is None else served.checkpoint)
        if (source.adapter, source.base) != (promoted.source.adapter, promoted.source.base):
            await promoted.change(source)
            log.info("%s: answers from step %d now", self._name, source.step)
        await self._start_candidate(served)

    async def _start_candidate(self, served: Served | None) -> None:
        if served is None or (canary := served.canary) is None or self._candidate is not None:
            return
        self._candidate = canary, await self._start(canary.checkpoint)
        step = self._candidate[1].policy.source.step
        log.info("%s: step %d answers %.0f %% of the conversations", self._name, step, canary.share * 100)

    def _drop_failed(self) -> bool:
        """Returns True if the candidate's engine has failed; then the promoted policy answers."""
        if self._candidate is None or not (watching := self._candidate[1].watching).done():
            return False
        log.warning("the candidate does not answer: %s; it starts again in a minute", watching.exception())
        (_, arm), self._candidate = self._candidate, None
        self._retire(arm)
        return True

    async def _start(self, checkpoint: str | None) -> _Arm:
        source = await call_in_thread(self._source, checkpoint)
        policy = ServedPolicy(source, self._loader)
        await policy.start()
        self._first = self._first or (source if source.adapter is not None else None)
        return _Arm(policy, asyncio.create_task(policy.watch()))

    def _retire(self, arm: _Arm) -> None:
        """Closes the engine after its last call."""
        arm.watching.cancel()
        retiring = asyncio.create_task(arm.policy.retire())
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)

    def _source(self, checkpoint: str | None) -> Source:
        """Returns the source of a checkpoint of the run, by default of the one that the run offers."""
        if checkpoint is None:
            found = run_checkpoints.choose(self._run, "offered")
        elif (there := run_checkpoints.find(self._run.root / checkpoint)) is not None:
            found = there
        else:
            raise CheckpointError(f"{self._run.root / checkpoint}: no such checkpoint")
        run_checkpoints.log_policy(found.path, found.why)
        if self._first is None:
            return of_checkpoint(found, name=self._name)
        return of_checkpoint(found, name=self._name, base=self._first.base)._replace(max_length=self._first.max_length)
