"""VllmEngine: samples from a vLLM server, started here or already running.

    request -> waits while the server restarts or sleeps -> HttpBackend of the step's adapter -> the server

A server that dies is started once more (shared_server.py). Requests in flight fail with transport errors, so their
rollouts are retried; new requests wait. If the second server also dies, the engine has failed: `watch` and every other
call raise. Replicas are ranks inside the server, which distributes requests and loads adapters into all of them.
`beside` returns an engine for another policy in the same server.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from art_cli.chat import Backend, EngineLoad
from art_cli.chat.chat_errors import INVALID_REQUEST, ChatError
from art_cli.chat.client import HttpBackend
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request, masks_logits, needs_echo
from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines import Endpoint, EngineSetup
from art_cli.engines.proof import MOST_GAP
from art_cli.engines.vllm import arguments
from art_cli.engines.vllm.chats import Chats
from art_cli.engines.vllm.control import LoadedAdapters, Ready, Refused, Scored, Unreachable
from art_cli.engines.vllm.shared_server import MAX_RESTARTS, SharedServer
from art_cli.engines.vllm.vllm_server import OwnServer, restore_arguments
from art_cli.models.policy_spec import PolicySpec
from art_cli.runtime.errors import DriftError, EngineError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DEATH_S = 2.0  # longest delay between a failed request and noticing the server's death
NOTICE_S = 10.0  # for repeatable calls
DRAIN_S = 600.0  # longest wait for requests in flight before sleeping
POLL_S = 0.05
TOO_LONG = ("maximum context length", "context length is", "max_model_len")  # phrases in vLLM's errors
TOO_LONG_CODE = "context_length_exceeded"
# Largest mean |difference| in nats between the likeliest next tokens' logprobs with and without the prefix cache.
# Different kernels round differently in float32. In bfloat16, unlikely tokens differ by a tenth of a nat and more.
STALE_BOUNDS = {"float32": 1e-3}


class VllmEngine:
    """Engine and Backend in one. Before any `load` it samples from the base model."""

    def __init__(
        self,
        config: VllmEngineConfig,
        model: PolicySpec,
        *,
        name: str,
        step: int = 0,
        logs: Path,
        shared: SharedServer | None = None,
    ) -> None:
        """Starts a server unless `shared` names one. Raises EngineError for a missing Python or unfit setting."""
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        self._config, self.dtype, self._logs = config, model.dtype, logs
        self._shared = shared or SharedServer(config, model, name=name, logs=logs)
        self._server = self._shared.process
        given = arguments.user_args(config).keys() & {"tool-call-parser", "reasoning-parser"}
        has_parsers = config.base_url is not None or bool(given)
        self._chats = Chats(model, has_parsers=has_parsers)
        self._scores_alone = isinstance(self._server, OwnServer) and not self._server.has_gpu
        self._name = name
        self._adapters: LoadedAdapters | None = None  # in the newest server
        self._loaded: tuple[Path, int] | None = None  # checkpoint and step
        self._ready = Ready(config.start_timeout_s)
        self._awake = asyncio.Event()
        self._steering = asyncio.Lock()

    @classmethod
    def of(cls, config: VllmEngineConfig, setup: EngineSetup) -> "VllmEngine":
        assert setup.policy is not None, "vLLM has to know which base model it serves"
        config = arguments.with_slots(config, setup.num_policies)
        return cls(config, setup.policy, name=setup.name, step=setup.step, logs=setup.logs)

    def beside(self, policy: PolicySpec, *, name: str, step: int) -> "VllmEngine | None":
        """Returns an engine for another policy in the same server; None if the server cannot serve it as well."""
        if not self._shared.has_room_for(policy):
            return None
        return VllmEngine(self._config, policy, name=name, step=step, logs=self._logs, shared=self._shared)

    @property
    def backend(self) -> Backend:
        return self

    @property
    def pid(self) -> int:
        """The server's process id; 0 for a foreign server and before start."""
        return self._server.pid

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        assert self._adapters is None, "started twice"
        self._awake.set()
        await self._chats.start()
        await self._shared.join(self)

    async def load(self, checkpoint: Path, step: int) -> None:
        """Raises CheckpointError without an adapter; EngineError if the server rejects it or is permanently gone."""

        async def load(adapters: LoadedAdapters) -> None:
            await adapters.load(checkpoint, step)
            self._loaded = checkpoint, step

        await self._steer(load)
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids: list[int]) -> list[float]:
        return (await self.score_replicas(token_ids))[0]

    async def score_replicas(self, token_ids: list[int]) -> list[list[float]]:
        """Returns scores per replica. Raises DriftError if a prefix cache holds results from other weights."""
        replicas = range(self._config.replicas) if self._config.replicas > 1 else (None,)

        async def score(adapters: LoadedAdapters) -> list[tuple[Scored, Scored]]:
            ask = partial(adapters.control.score, token_ids=token_ids, timeout_s=self._config.timeout_s)
            scored = []
            async with self.scoring():
                with adapters.lease() as backend:
                    for rank in replicas:
                        cached = await ask(backend.model, is_cached=True, rank=rank)
                        scored.append((cached, await ask(backend.model, is_cached=False, rank=rank)))
            return scored

        scored = await self._steer(score)
        for cached, anew in scored:
            self._check_cache(cached, anew)
        return [anew.logprobs for _, anew in scored]

    def sampling(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Admits a sampling request. Any number may run together."""
        return self._shared.traffic.shared()

    def scoring(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Admits a request for prompt logprobs, alone in the server if vLLM cannot mix it with sampling."""
        return self._shared.traffic.alone() if self._scores_alone else self._shared.traffic.shared()

    def longest_prompt(self) -> None:
        """Returns None, because only the server knows its tokenizer."""

    async def occupancy(self) -> EngineLoad | None:
        """Returns the load from all clients of the server; None when the server shows no metrics."""
        try:
            load = await self._adapters.control.load() if self._adapters is not None else None
        except EngineError:
            return None
        most = arguments.user_args(self._config).get("max-num-seqs")
        return load._replace(room=most * self._config.replicas) if load and isinstance(most, int) else load

    async def sleep(self) -> None:
        """Waits for requests in flight, then frees GPU memory for the learner; does nothing on separate GPUs."""
        if self._server.sleep_level == 0:
            return
        self._awake.clear()

        async def sleep(adapters: LoadedAdapters) -> None:
            await until(lambda: adapters.num_requests == 0, DRAIN_S, "requests in flight did not end before its sleep")
            await adapters.control.sleep(self._server.sleep_level)

        await self._steer(sleep)
        self._shared.may_restart.clear()  # a server that dies during sleep restarts when memory is free again

    async def wake(self) -> None:
        """Resumes sampling; the learner has freed its temporary memory."""
        if self._server.sleep_level == 0:
            return
        slept = self._adapters
        self._shared.may_restart.set()
        drops_base = self._server.sleep_level == 2

        async def wake(adapters: LoadedAdapters) -> None:
            if adapters is not slept:  # the server was restarted meanwhile
                return
            await adapters.control.wake(reload_base=drops_base)
            if drops_base and self._loaded is not None:  # adapters are lost together with base weights
                await adapters.load(*self._loaded)

        await self._steer(wake)
        self._awake.set()

    async def watch(self) -> NoReturn:
        """Never returns; raises EngineError after a permanent failure."""
        await self._ready.failure()

    async def close(self) -> None:
        is_last = await self._shared.leave(self)
        self._ready.fail("the engine is closed")
        if self._adapters is not None:
            await self._adapters.close(unload=not is_last or not self._shared.is_own)
        if is_last:
            await self._server.stop()

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        request = self._chats.ended(request)
        try:
            return await self._reply(request)
        except ChatError as error:
            if error.code != TOO_LONG_CODE or (shorter := await self._chats.bounded(request)) is None:
                raise
            return await self._reply(shorter)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        request = self._chats.ended(request)
        try:
            async with contextlib.aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ChatError as error:  # rejected before any chunk
            if error.code != TOO_LONG_CODE or (shorter := await self._chats.bounded(request)) is None:
                raise
            async with contextlib.aclosing(self._stream(shorter)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _reply(self, request: Request) -> Reply:
        chat = await self._chats.rendered(request)
        asked = self._server.verbatim.put_into(request) if chat is None else chat.request
        async with self._admitted(request) as (adapters, backend), self._failures(adapters):
            reply = await backend.reply(asked)
        reply = reply if chat is None else chat.reply(reply)
        for choice in reply.choices:
            complete_logprobs(request, choice)
            restore_arguments(choice)
        return reply

    async def _stream(self, request: Request) -> AsyncGenerator[Chunk]:
        chat = await self._chats.rendered(request)
        asked = self._server.verbatim.put_into(request) if chat is None else chat.request
        async with (
            self._admitted(request) as (adapters, backend),
            self._failures(adapters),
            contextlib.aclosing(backend.stream(asked)) as chunks,
        ):
            async for chunk in chunks:
                complete_logprobs(request, chunk.choice)
                yield chunk if chat is None else chat.chunk(chunk)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[LoadedAdapters, HttpBackend]]:
        """Yields adapters and client for a request. Raises ChatError for an unknown model or a failed engine."""
        await self._admit(request)
        async with self.scoring() if needs_echo(request) else self.sampling():
            adapters = await self._admit(request)  # the server may have been replaced during a wait
            with adapters.lease() as backend:
                yield adapters, backend

    async def _admit(self, request: Request) -> LoadedAdapters:
        """Waits until the server answers. Raises ChatError for an unknown model or a failed engine."""
        if request.model != self.endpoint.model:
            raise ChatError(404, f"the model {request.model!r} does not exist", param="model", code="model_not_found")
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._awake.wait()
            return await self.ready_adapters()
        except TimeoutError:
            raise ChatError(503, "the engine sleeps, and was not woken in time", code="engine_asleep") from None
        except EngineError as error:
            raise ChatError(503, str(error).partition("\n")[0], code="engine_failed") from error

    @contextlib.asynccontextmanager
    async def _failures(self, adapters: LoadedAdapters) -> AsyncIterator[None]:
        """Delays an error to see whether the server died, so a retry waits for the new server."""
        try:
            yield
        except ChatError as error:
            _put_in_openai_words(error)
            if error.status >= 500 and self.pid:
                with contextlib.suppress(EngineError):
                    await until(partial(self._is_lost, adapters), DEATH_S, "it lives")
            raise

    # --- Member of the server -----------------------------------------------------------------------------------------

    async def attach(self) -> None:
        """Loads the current adapter into a server that has just started, or that other engines use already."""
        adapters = LoadedAdapters(
            self._server.control,
            self.make_backend,
            base=self._server.base_name,
            # in a running server, a random part avoids leftover names
            prefix=self._name if self._shared.is_own else f"{self._name}-{secrets.token_hex(4)}",
            step=self.endpoint.step,
            names=self._shared.adapter_names,
        )
        self._adapters = adapters
        if self._loaded is not None:
            await adapters.load(*self._loaded)
        self._ready.set()

    async def detach(self) -> None:
        self._ready.clear()
        await self._adapters_or_fail().close(unload=False)

    def fail(self, message: str) -> None:
        self._ready.fail(message)

    # --- the server ---------------------------------------------------------------------------------------------------

    def make_backend(self, name: str, step: int) -> HttpBackend:
        url = f"{self._server.control.root}/v1"
        return HttpBackend(url, self._server.key, name, step=step, timeout_s=self._config.timeout_s)

    def _adapters_or_fail(self) -> LoadedAdapters:
        assert self._adapters is not None, "ready without a server"
        return self._adapters

    async def _steer(self, work: Callable[[LoadedAdapters], Awaitable[Result]]) -> Result:
        """Returns the result of `work`, repeated if the server died meanwhile and a new server answers."""
        async with self._steering:
            for _ in range(MAX_RESTARTS + 1):
                adapters = await self.ready_adapters()
                try:
                    return await work(adapters)
                except (Unreachable, Refused) as error:
                    if isinstance(error, Refused) and error.status < 500:
                        raise
                    await until(partial(self._is_lost, adapters), NOTICE_S, str(error))
            await self._ready.wait()  # raises, because the watcher has given up
            raise AssertionError("more restarts than allowed")

    def _is_lost(self, adapters: LoadedAdapters) -> bool:
        return self._adapters is not adapters or not self._ready.is_set

    async def ready_adapters(self) -> LoadedAdapters:
        """Waits for a server and returns its adapters. Raises EngineError after a permanent failure."""
        await self._ready.wait()
        return self._adapters_or_fail()

    def _check_cache(self, cached: Scored, anew: Scored) -> None:
        common = cached.next.keys() & anew.next.keys()
        gaps = [abs(cached.next[token] - anew.next[token]) for token in common] or [float("inf")]
        gap, bound = sum(gaps) / len(gaps), STALE_BOUNDS.get(self.dtype, MOST_GAP)
        if not gap <= bound:
            raise DriftError(
                f"step {self.endpoint.step}: vLLM's prefix cache holds what other weights computed: the likeliest next "
                f"tokens of the probe differ by {gap:.2e} nats with it and without, bound {bound:.0e}"
            )


async def until(is_so: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Waits until `is_so()` is true. Raises EngineError with the text `otherwise` on timeout."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not is_so():
        if asyncio.get_running_loop().time() > deadline:
            raise EngineError(f"vllm: {otherwise}")
        await asyncio.sleep(POLL_S)


def _put_in_openai_words(error: ChatError) -> None:
    """Gives an error OpenAI's type and code; vLLM has a Python class name and the status there."""
    if error.status >= 500:
        return
    error.type = INVALID_REQUEST
    if error.code == str(error.status):
        error.code = None
    if error.status == 400 and any(words in error.message for words in TOO_LONG):
        error.code = TOO_LONG_CODE


def complete_logprobs(request: Request, choice: Choice) -> None:
    """Fills in both logprobs of our records from vLLM's single logprob, computed on processed logits.

    At temperature 0, vLLM reports the raw logprob, and the sampled token was certain. At temperature 1 without cuts,
    both are equal. Otherwise raw logprobs stay unknown. A format, forced call, penalty or bias changes the logits in
    ways the learner cannot reproduce, so the learner uses its own logprobs.
    """
    sampling = request.sampling
    if choice.raw_logprobs is not None or masks_logits(request):
        return
    if sampling.temperature == 0:
        choice.raw_logprobs, choice.logprobs = choice.logprobs, [0.0] * len(choice.logprobs)
    elif sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0:
        choice.raw_logprobs = list(choice.logprobs)
