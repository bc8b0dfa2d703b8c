"""VllmEngine: samples from a vLLM server, one that it starts and owns, or one that runs already.

    request -> waits while the server restarts or sleeps -> HttpBackend of the step's adapter -> the server

A watcher sees the server's end at once, starts a new one, once, and loads the current adapter again. Requests in flight
fail as failures of transport, so that their rollouts are played again; new ones wait. When the second server ends, the
engine has failed: `watch` and every other call raise. Several replicas are ranks of the one server, which divides the
requests among them and loads an adapter into all.

Traffic decides which requests may be in the server beside each other. On a CPU vLLM 0.32 dies of a batch with LoRA that
asks for a prompt's logprobs and holds another request: its logits of all the prompt's tokens meet a mapping of one row
a request ("einsum(): subscript b"). A prompt is therefore scored alone there. Traffic can go when
https://github.com/vllm-project/vllm/issues/16668 is closed.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from art_cli.chat import Backend, EngineLoad
from art_cli.chat.chat_app import closing_stream
from art_cli.chat.chat_errors import INVALID_REQUEST, ChatError
from art_cli.chat.client import HttpBackend
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request, demands_format, needs_echo
from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines import Endpoint, EngineSetup
from art_cli.engines.proof import MOST_GAP
from art_cli.engines.vllm.chats import Chats
from art_cli.engines.vllm.control import LoadedAdapters, Ready, Refused, Scored, Unreachable
from art_cli.engines.vllm.vllm_server import OwnServer, RunningServer, restore_arguments
from art_cli.models.policy_spec import PolicySpec
from art_cli.runtime.errors import DriftError, EngineError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Traffic:
    """Requests that share the server, and requests that are alone in it, in the order in which they come."""

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


MAX_RESTARTS = 1
DEATH_S = 2.0  # longest time between a failed request and the news that the server ended
NOTICE_S = 10.0  # the same for calls that can be made again
DRAIN_S = 600.0  # longest wait for requests in flight to end before a sleep
POLL_S = 0.05
TOO_LONG = ("maximum context length", "context length is", "max_model_len")  # phrases of vLLM's errors
TOO_LONG_CODE = "context_length_exceeded"
# Largest mean |difference| in nats of the likeliest next tokens, computed with the prefix cache and without it. In
# float32 other kernels round differently. In bfloat16 unlikely tokens differ by a tenth of a nat and more.
STALE_BOUNDS = {"float32": 1e-3}


class VllmEngine:
    """Engine and Backend in one. Before the first `load` it samples from the base model."""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, name: str, step: int = 0, logs: Path) -> None:
        """Raises EngineError if there is no such Python, or this machine cannot have a setting."""
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        self._config, self.dtype = config, model.dtype
        self._server: OwnServer | RunningServer
        if config.base_url is None:
            self._server = OwnServer(config, model, name=name, log=logs / "vllm.log")
        else:
            self._server = RunningServer(config, config.base_url)
        given = {name.replace("_", "-") for name in config.args}
        has_parsers = config.base_url is not None or bool(given & {"tool-call-parser", "reasoning-parser"})
        self._chats = Chats(model, has_parsers=has_parsers)
        self._traffic = Traffic()
        self._scores_alone = isinstance(self._server, OwnServer) and not self._server.has_gpu
        self._name = name
        self._adapters: LoadedAdapters | None = None  # those of the newest server
        self._loaded: tuple[Path, int] | None = None  # checkpoint and step
        self._ready = Ready(config.start_timeout_s)
        self._awake, self._may_restart = asyncio.Event(), asyncio.Event()
        self._steering = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: VllmEngineConfig, setup: EngineSetup) -> "VllmEngine":
        assert setup.policy is not None, "vLLM has to know which base model it serves"
        return cls(config, setup.policy, name=setup.name, step=setup.step, logs=setup.logs)

    @property
    def backend(self) -> Backend:
        return self

    @property
    def pid(self) -> int:
        """The server's process id; 0 where it is not ours or not started."""
        return self._server.pid

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        assert self._watcher is None, "started twice"
        self._awake.set()
        self._may_restart.set()
        try:
            await self._chats.start()
            await self._bring_up()
        except BaseException:
            await self._server.stop()
            raise
        self._watcher = asyncio.create_task(self._watch_server())

    async def load(self, checkpoint: Path, step: int) -> None:
        """Raises CheckpointError if there is no adapter; EngineError if the server refuses it, or is gone for good."""

        async def load(adapters: LoadedAdapters) -> None:
            await adapters.load(checkpoint, step)
            self._loaded = checkpoint, step

        await self._steer(load)
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids: list[int]) -> list[float]:
        return (await self.score_replicas(token_ids))[0]

    async def score_replicas(self, token_ids: list[int]) -> list[list[float]]:
        """Returns the scores of each replica. Raises DriftError if other weights computed what a prefix cache holds."""
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
        """Enters as a request that samples. Any number of them run at once."""
        return self._traffic.shared()

    def scoring(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Enters as a request for the logprobs of a prompt. Where vLLM could not do both, it waits for the requests
        that sample to end, and new ones wait for it."""
        return self._traffic.alone() if self._scores_alone else self._traffic.shared()

    def longest_prompt(self) -> None:
        """Unknown, because the tokenizer is the server's."""

    async def occupancy(self) -> EngineLoad | None:
        """Counts all clients of the server; None while it does not answer, or shows no metrics."""
        try:
            load = await self._adapters.control.load() if self._adapters is not None else None
        except EngineError:
            return None
        args = {name.replace("_", "-"): value for name, value in self._config.args.items()}
        most = args.get("max-num-seqs")
        return load._replace(room=most * self._config.replicas) if load and isinstance(most, int) else load

    async def sleep(self) -> None:
        """Requests in flight are answered, then the GPU's memory is the learner's; nothing where they share none."""
        if self._server.sleep_level == 0:
            return
        self._awake.clear()

        async def sleep(adapters: LoadedAdapters) -> None:
            await until(lambda: adapters.num_requests == 0, DRAIN_S, "requests in flight did not end before its sleep")
            await adapters.control.sleep(self._server.sleep_level)

        await self._steer(sleep)
        self._may_restart.clear()  # a server that dies now comes back when there is memory for it

    async def wake(self) -> None:
        """Answers again; the learner has let go of the memory that it does not hold on to."""
        if self._server.sleep_level == 0:
            return
        slept = self._adapters
        self._may_restart.set()
        drops_base = self._server.sleep_level == 2

        async def wake(adapters: LoadedAdapters) -> None:
            if adapters is not slept:  # it was started anew meanwhile
                return
            await adapters.control.wake(reload_base=drops_base)
            if drops_base and self._loaded is not None:  # adapters went with the base weights
                await adapters.load(*self._loaded)

        await self._steer(wake)
        self._awake.set()

    async def watch(self) -> NoReturn:
        """Returns never; raises EngineError once the engine has failed for good."""
        await self._ready.failure()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
        self._ready.fail("the engine is closed")
        if self._adapters is not None:
            await self._adapters.close(unload=isinstance(self._server, RunningServer))
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

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        request = self._chats.ended(request)
        try:
            async with closing_stream(self._stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ChatError as error:  # refused before its first chunk
            if error.code != TOO_LONG_CODE or (shorter := await self._chats.bounded(request)) is None:
                raise
            async with closing_stream(self._stream(shorter)) as chunks:
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

    async def _stream(self, request: Request) -> AsyncIterator[Chunk]:
        chat = await self._chats.rendered(request)
        asked = self._server.verbatim.put_into(request) if chat is None else chat.request
        async with (
            self._admitted(request) as (adapters, backend),
            self._failures(adapters),
            closing_stream(backend.stream(asked)) as chunks,
        ):
            async for chunk in chunks:
                complete_logprobs(request, chunk.choice)
                yield chunk if chat is None else chat.chunk(chunk)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[tuple[LoadedAdapters, HttpBackend]]:
        """The server's adapters and the client of the current one, as soon as the request may begin. Raises ChatError
        if no such model, or the engine has failed."""
        await self._admit(request)
        async with self.scoring() if needs_echo(request) else self.sampling():
            adapters = await self._admit(request)  # a new server may have come while a prompt was scored
            with adapters.lease() as backend:
                yield adapters, backend

    async def _admit(self, request: Request) -> LoadedAdapters:
        """Returns the server's adapters as soon as it answers. Raises ChatError if it has no such model, or failed."""
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
        """Holds back a failure until it is known whether the server died, so that the next try waits for a new one."""
        try:
            yield
        except ChatError as error:
            _put_in_openai_words(error)
            if error.status >= 500 and self.pid:
                with contextlib.suppress(EngineError):
                    await until(partial(self._is_lost, adapters), DEATH_S, "it lives")
            raise

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Returns when a new server answers and has loaded the current adapter."""
        await self._server.start()
        adapters = LoadedAdapters(
            self._server.control,
            self.make_backend,
            base=self._server.base_name,
            prefix=self._prefix(),
            step=self.endpoint.step,
        )
        self._adapters = adapters
        if self._loaded is not None:
            await adapters.load(*self._loaded)
        self._ready.set()

    def _prefix(self) -> str:
        """Returns the beginning of the adapters' names. The random part keeps apart those that others, an earlier run
        of this name, or a connection that was lost, left in a running server."""
        return self._name if isinstance(self._server, OwnServer) else f"{self._name}-{secrets.token_hex(4)}"

    def make_backend(self, name: str, step: int) -> HttpBackend:
        url = f"{self._server.control.root}/v1"
        return HttpBackend(url, self._server.key, name, step=step, timeout_s=self._config.timeout_s)

    async def _watch_server(self) -> None:
        """Starts the server anew when it ends, a few times."""
        try:
            for number in range(MAX_RESTARTS + 1):
                reason = await self._server.ended()
                self._ready.clear()
                message = f"vllm: the server ended ({reason}); {self._server.last_lines()}"
                await self._clear_away()
                if number == MAX_RESTARTS:
                    raise EngineError(message)
                for line in (*message.splitlines(), "it is started once more"):
                    log.warning("%s", line)
                await self._may_restart.wait()
                await self._bring_up()
                log.warning("vllm: the server answers again")
        except (
            Exception
        ) as error:  # the boundary of this task, because those who wait for the server must get the error
            self._ready.fail(str(error) if isinstance(error, EngineError) else f"vllm: {type(error).__name__}: {error}")

    async def _clear_away(self) -> None:
        assert self._adapters is not None
        await self._adapters.close(unload=False)
        await self._server.stop()

    async def _steer(self, work: Callable[[LoadedAdapters], Awaitable[Result]]) -> Result:
        """Returns the result of `work`, done again when the server ends in the middle of it and a new one answers."""
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
        """Returns those of the server that answers now. Raises EngineError if none will any more."""
        await self._ready.wait()
        assert self._adapters is not None, "ready without a server"
        return self._adapters

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
    """Returns when `is_so()`. Raises EngineError with the words `otherwise` when it is not so in time."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not is_so():
        if asyncio.get_running_loop().time() > deadline:
            raise EngineError(f"vllm: {otherwise}")
        await asyncio.sleep(POLL_S)


def _put_in_openai_words(error: ChatError) -> None:
    """Gives a refusal OpenAI's type and code. vLLM has the name of a Python class and the status there."""
    if error.status >= 500:
        return
    error.type = INVALID_REQUEST
    if error.code == str(error.status):
        error.code = None
    if error.status == 400 and any(words in error.message for words in TOO_LONG):
        error.code = TOO_LONG_CODE


def complete_logprobs(request: Request, choice: Choice) -> None:
    """Completes the two logprobs of our records from the one that vLLM reports, that of its processed logits.

    At temperature 0 vLLM reports the raw logprob, and the token was certain. At temperature 1 with nothing cut the two
    are the same. Otherwise the raw ones stay unknown. With a format, a forced call, a penalty or a bias the logits are
    changed, which no learner can compute, so the learner uses its own logprobs.
    """
    sampling = request.sampling
    if choice.raw_logprobs is not None:
        return
    choice.is_masked = demands_format(request) or bool(sampling.reshaping)
    if choice.is_masked:
        return
    if sampling.temperature == 0:
        choice.raw_logprobs, choice.logprobs = choice.logprobs, [0.0] * len(choice.logprobs)
    elif sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0:
        choice.raw_logprobs = list(choice.logprobs)
