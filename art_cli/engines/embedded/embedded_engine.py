"""EmbeddedEngine: samples from the policy in this process. This is the asyncio side; engine_thread.py runs the model.

    Request -> chat_prompts.render -> Generations -> EngineThread samples -> Pieces -> ChoiceWriter -> Reply or Chunks

It answers requests (`backend` is the engine itself) without opening a port. With `shares_weights`, a learner in this
process updates the same weights, so `load` only records the step. Otherwise `load` reads the checkpoint.
"""

import asyncio
import contextlib
import secrets
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, TypeVar

import msgspec
import numpy as np

from art_cli.chat import Backend, EngineLoad
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import RequestReader
from art_cli.chat.replies import Chunk, Echo, Reply
from art_cli.chat.requests import Request, needs_echo
from art_cli.config.sections.engine_config import EmbeddedEngineConfig
from art_cli.engines import Endpoint, EngineSetup
from art_cli.engines.embedded import chat_prompts, token_sampling
from art_cli.engines.embedded.chat_prompts import Prompt
from art_cli.engines.embedded.choices import ChoiceWriter, Piece, context_of, echo_of, reply_limit
from art_cli.engines.embedded.engine_thread import EngineThread, Generation
from art_cli.engines.embedded.grammars import GrammarError, Grammars
from art_cli.engines.embedded.model_runner import ForwardRunner, ScoredPart
from art_cli.engines.embedded.reply_text import Detokenizer, Vocabulary
from art_cli.engines.embedded.scheduler import Scheduler, TokenSequence
from art_cli.engines.embedded.token_sampling import Reshaping
from art_cli.models.saved_weights import load_checkpoint
from art_cli.models.weights import Weights
from art_cli.runtime import openmp, threads
from art_cli.runtime.errors import EngineError

Result = TypeVar("Result")

LOCK_DEADLINE_S = 600.0  # longest wait for the weights, because a learner holds them for a whole step
REPLY_DEADLINE_S = 3600.0
CLOSE_DEADLINE_S = 60.0
WATCH_EVERY_S = 1.0
DRAIN_EVERY_S = 0.01
MAX_ALTERNATIVES = 2**21  # top_logprobs in all unstreamed replies together; each takes some 160 bytes


class EmbeddedEngine:
    """Engine and Backend in one. Samples all requests in flight together."""

    def __init__(
        self,
        weights: Weights,
        *,
        name: str,
        config: EmbeddedEngineConfig,
        step: int = 0,
        shares_weights: bool = True,
    ) -> None:
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        self._weights, self._config, self._shares_weights = weights, config, shares_weights
        self._vocabulary = Vocabulary(weights.tokenizer)
        vocab, stop_ids = weights.vocabulary, weights.stop_ids
        self._stop_ids = [id for id in stop_ids if id < vocab]
        self._grammars = Grammars(weights.tokenizer, vocab=vocab, stop_ids=stop_ids)
        self._reader = RequestReader()
        self._room = _Room(MAX_ALTERNATIVES)
        self._thread: EngineThread | None = None
        self._runner: ForwardRunner | None = None
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, config: EmbeddedEngineConfig, setup: EngineSetup) -> Self:
        assert setup.weights is not None, "the embedded engine samples from weights in this process"
        return cls(setup.weights, name=setup.name, config=config, step=setup.step, shares_weights=setup.shares_weights)

    @property
    def backend(self) -> Backend:
        return self

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineError if the model cannot run here."""
        assert self._thread is None, "started twice"
        self._runner = ForwardRunner(self._weights)
        scheduler = Scheduler(
            max_slots=self._config.max_batch,
            prefill_tokens=self._config.prefill_tokens,
            max_length=self._weights.max_length,
            max_tokens=self._runner.token_budget(),
        )
        self._thread = EngineThread(self._runner, scheduler, step=self.endpoint.step)
        self._thread.start()
        openmp.release_pool()  # the runner's check of the model has used this thread's pool

    async def load(self, checkpoint: Path, step: int) -> None:
        """Raises CheckpointError if the checkpoint does not fit; EngineError if the weights stay locked too long."""
        thread = self._running_thread()

        def load() -> None:
            if not self._shares_weights:
                load_checkpoint(self._weights, checkpoint)
            thread.set_step(step)

        async with contextlib.nullcontext() if self._shares_weights else self._drained(thread):
            await self._with_weights(load)
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    @contextlib.asynccontextmanager
    async def _drained(self, thread: EngineThread) -> AsyncIterator[None]:
        """Runs the block while no reply is in flight, so no reply mixes two policies; new requests wait meanwhile.

        Raises EngineError if replies in flight do not end in time.
        """
        deadline = time.monotonic() + REPLY_DEADLINE_S
        thread.hold(True)
        try:
            while not thread.is_drained:
                thread.check()
                if time.monotonic() > deadline:
                    raise EngineError(f"replies in flight did not end within {REPLY_DEADLINE_S:.0f} s")
                await asyncio.sleep(DRAIN_EVERY_S)
            yield
        finally:
            thread.hold(False)

    async def score(self, token_ids: list[int]) -> list[float]:
        self._running_thread()
        assert self._runner is not None
        return await self._with_weights(partial(self._runner.score, token_ids))

    def longest_prompt(self) -> int:
        return self._weights.max_length * self._vocabulary.longest

    async def occupancy(self) -> EngineLoad:
        return self._running_thread().occupancy()

    async def sleep(self) -> None:
        """Frees keys and values; the learner keeps the weights. Running generations continue later."""
        await self._with_weights(self._running_thread().let_go)

    async def wake(self) -> None:
        """Does nothing: sampling starts with the next request."""

    async def watch(self) -> NoReturn:
        while True:
            self._running_thread()
            await asyncio.sleep(WATCH_EVERY_S)

    async def close(self) -> None:
        self._grammars.close()
        if self._thread is not None and not await asyncio.to_thread(self._thread.close, CLOSE_DEADLINE_S):
            raise EngineError(f"the embedded engine's thread did not end within {CLOSE_DEADLINE_S:.0f} s")

    async def _with_weights(self, work: Callable[[], Result]) -> Result:
        def locked() -> Result:
            if not self._weights.lock.acquire(timeout=LOCK_DEADLINE_S):
                raise EngineError(f"the weights were not free within {LOCK_DEADLINE_S:.0f} s; is the learner stuck?")
            try:
                return work()
            finally:
                self._weights.lock.release()

        return await threads.compute(locked)

    def _running_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("the embedded engine was not started")
        self._thread.check()
        return self._thread

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        job = await self._job(request)
        async with self._room.taken(job.num_alternatives):
            with self._submitted(job):
                async with _deadline():
                    pieces = [await job.next() for _ in range(request.sampling.n)]
        pieces.sort(key=lambda taken: taken[0])
        return Reply(
            id=job.id,
            created=job.created,
            model=request.model,
            choices=[self._writer(job, index).whole(piece) for index, piece in pieces],
            prompt_ids=job.prompt.ids,
            step=min(piece.step for _, piece in pieces),
            sampling=job.sampling,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        job = await self._job(request, is_stream=True)
        writers = [self._writer(job, index) for index in range(request.sampling.n)]
        open_choices, is_first = len(writers), True
        with self._submitted(job):
            while open_choices:
                async with _deadline():
                    index, piece = await job.next()
                yield Chunk(
                    id=job.id,
                    created=job.created,
                    model=request.model,
                    choice=writers[index].write(piece),
                    is_last=piece.finish_reason is not None,
                    prompt_ids=job.prompt.ids if is_first else None,
                    step=piece.step,
                    sampling=job.sampling,
                )
                open_choices -= piece.finish_reason is not None
                is_first = False

    async def _job(self, request: Request, *, is_stream: bool = False) -> "_Job":
        if request.model != self.endpoint.model:
            raise ChatError(404, f"the model {request.model!r} does not exist", param="model", code="model_not_found")
        prompt = await self._prompt(request)
        if prompt.format is not None and (request.sampling.min_tokens or request.sampling.ignore_eos):
            raise invalid("min_tokens, ignore_eos: not with a format or a forced call, whose end decides", "min_tokens")
        mailbox = self._mailboxes.setdefault(loop := asyncio.get_running_loop(), _Mailbox(loop))
        job = _Job(request, prompt, self._weights, self._vocabulary, mailbox, is_stream, self._stop_ids)
        for index in range(0 if job.generations else job.num_open):  # no room for a token
            job.put(index, Piece([], [], [], None, self.endpoint.step, "length"))
        if needs_echo(request):
            job.echo = await self._echo(request, prompt.ids)
        if prompt.format is not None:
            matcher = await self._grammars.compile(prompt.format)
            for generation in job.generations:
                generation.matcher = matcher.deep_copy()
        return job

    async def _echo(self, request: Request, ids: list[int]) -> Echo:
        """Returns the prompt, with logprobs if requested.

        The weights are held for one part at a time, so other requests are sampled in between. Scoring restarts if the
        weights change between parts.
        """
        version: object = None
        found: list[ScoredPart] = []
        thread, runner = self._running_thread(), self._runner
        assert runner is not None
        num_top = min(request.top_logprobs, self._weights.vocabulary)

        def next_part() -> tuple[object, ScoredPart | None]:
            return (self._weights.version, thread.step), next(parts, None)

        parts: Iterator[ScoredPart] = iter(())
        while request.wants_logprobs:
            now, part = await self._with_weights(next_part)
            if now != version:
                version, found, parts = now, [], runner.score_parts(ids, num_top)
            elif part is None:
                break
            else:
                found.append(part)
        logprobs = [logprob for part in found for logprob in part.logprobs]
        top = [likeliest for part in found for likeliest in part.top]
        return await threads.call_in_thread(echo_of, self._vocabulary, request, ids, logprobs, top)

    async def _prompt(self, request: Request) -> Prompt:
        """Renders short requests on the event loop, where this is faster than using a thread."""
        if chat_prompts.is_short(request):
            return chat_prompts.render(self._vocabulary, request, self._weights.max_length)
        return await self._reader.read(chat_prompts.render, self._vocabulary, request, self._weights.max_length)

    @contextlib.contextmanager
    def _submitted(self, job: "_Job") -> Iterator[None]:
        """Inside, the job's generations are sampled. Leaving early cancels unfinished generations."""
        try:
            thread = self._running_thread()
            thread.add(job.generations)
        except EngineError as error:
            raise ChatError(500, str(error)) from error
        try:
            yield
        finally:
            if job.num_open:
                thread.cancel(job.generations)

    def _writer(self, job: "_Job", index: int) -> ChoiceWriter:
        return ChoiceWriter(self._vocabulary, job.request, job.prompt, index, job.echo)


class _Mailbox:
    """Passes each step's pieces to an event loop in a single call. Pieces for a closed loop are dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)

    def __call__(self, pieces: list[tuple[Generation, Piece]]) -> None:
        with contextlib.suppress(RuntimeError):
            if (loop := self._loop()) is not None:
                loop.call_soon_threadsafe(self._hand_out, pieces)

    @staticmethod
    def _hand_out(pieces: list[tuple[Generation, Piece]]) -> None:
        for generation, piece in pieces:
            generation.owner.put(generation.choice, piece)


class _Job:
    """A request being answered: its generations, and a queue of their pieces."""

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        weights: Weights,
        vocabulary: Vocabulary,
        mailbox: _Mailbox,
        is_stream: bool,
        ends: Sequence[int],
    ) -> None:
        limit = reply_limit(request, prompt, weights.max_length, weights.vocabulary)
        self.id = f"{'chatcmpl' if request.messages is not None else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.request, self.prompt = request, prompt
        self.sampling = msgspec.structs.replace(request.sampling, max_tokens=limit - len(prompt.ids))
        self.num_open = request.sampling.n
        self.echo: Echo | None = None
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()  # choice number and piece
        self.num_top = request.top_logprobs if request.wants_logprobs else 0
        ids, sampling = np.array(prompt.ids, np.int64), request.sampling
        barred = np.array([*ends, *sampling.stop_ids], np.int64)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self.generations = [
            Generation(
                sequence=TokenSequence(ids, limit),
                sampling=sampling,
                seed=token_sampling.seed_of(seed, index),
                owner=self,
                choice=index,
                mailbox=mailbox,
                is_stream=is_stream,
                num_top=self.num_top,
                top_temperature=sampling.temperature if request.is_processed else 0.0,
                reshaping=Reshaping(sampling, ids, barred) if sampling.reshaping else None,
                text=Detokenizer(vocabulary, context_of(prompt)) if sampling.stop else None,
            )
            for index in range(sampling.n if limit > len(ids) else 0)
        ]
        for generation in self.generations:
            generation.sequence.payload = generation

    @property
    def num_alternatives(self) -> int:
        """The largest number of top_logprobs in the reply."""
        return self.sampling.n * (self.sampling.max_tokens or 0) * self.num_top

    def put(self, choice: int, piece: Piece) -> None:
        self._pieces.put_nowait((choice, piece))

    async def next(self) -> tuple[int, Piece]:
        """Returns the next choice number and piece. Raises ChatError 400 for a grammar error, 500 for the engine's."""
        choice, piece = await self._pieces.get()
        if isinstance(piece.failure, GrammarError):
            assert self.prompt.format is not None
            raise invalid(f"{self.prompt.format.param}: {piece.failure}", self.prompt.format.param)
        if piece.failure is not None:
            raise ChatError(500, str(piece.failure))
        self.num_open -= piece.finish_reason is not None
        return choice, piece


class _Room:
    """A limit on numbers held at the same time. Requests wait for room in arrival order, on any event loop."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def taken(self, num: int) -> AsyncIterator[None]:
        """Reserves room for `num` numbers. Raises ChatError 400 if they exceed the limit."""
        if num > self._size:
            message = f"n x max_tokens x top_logprobs is {num}, more than {self._size}; ask for fewer, or a stream"
            raise invalid(message, "top_logprobs")
        if num == 0:
            yield
            return
        entered = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((num, entered))
            self._admit()
        try:
            await entered
            yield
        finally:
            self._leave(num, entered)

    def _leave(self, num: int, entered: "asyncio.Future[None]") -> None:
        with self._lock:
            if (num, entered) in self._waiting:  # the client left before there was room
                self._waiting.remove((num, entered))
            else:
                self._free += num
            self._admit()

    def _admit(self) -> None:
        """Admits waiting requests in order while they fit. The caller holds the lock."""
        while self._waiting and self._waiting[0][0] <= self._free:
            num, entered = self._waiting.popleft()
            try:
                entered.get_loop().call_soon_threadsafe(_settle, entered)
            except RuntimeError:  # its event loop is closed
                continue
            self._free -= num


def _settle(entered: "asyncio.Future[None]") -> None:
    if not entered.done():
        entered.set_result(None)


@contextlib.asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(REPLY_DEADLINE_S):
            yield
    except TimeoutError as error:
        raise ChatError(504, f"no answer within {REPLY_DEADLINE_S:.0f} s") from error
