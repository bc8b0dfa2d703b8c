"""Service: policies on a port, from the first load to the last request.

    listen -> load -> ready -> ... -> stopping: 503 for new requests, those in flight end or run out of time -> closed

It listens before it loads, so that /health answers at once and /ready shows when requests are admitted. An engine that
fails ends it. SIGTERM and SIGINT stop it; a second signal ends it without waiting for requests in flight.

Dispatch takes a request to its policy's engine: it waits for a slot, counts tokens, and logs content if asked. Backlog
has the sampled chunks that a client has not taken yet.

    engine's stream -> a task -> Backlog -> application, at the client's speed

Sampling waits for no client. Chunks are joined while they wait. So a backlog is never larger than the whole reply
unstreamed, about 100 bytes a token, and a slow client gets fewer and longer pieces.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat import Backend
from art_cli.chat.api_keys import Keys
from art_cli.chat.chat_app import build_app, closing_stream, error_response
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import Stopping, Timeouts, cancel, serve
from art_cli.chat.reading import BODY_TIMEOUT_S, BodyLimit
from art_cli.chat.replies import Choice, Chunk, Reply, ReplyBuilder, join_deltas
from art_cli.chat.requests import Request
from art_cli.chat.wires import WIRES
from art_cli.runs.run_checkpoints import Which
from art_cli.runtime import threads
from art_cli.runtime.threads import end
from art_cli.serving.middleware import CONTENT_TYPE, READY, Admission, Meter, Middleware
from art_cli.serving.served_policies import Policies, ServedPolicy, follow

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 10.0  # longest wait for a backend to free what a cancelled request held
MIN_JOIN = 64  # number of chunks up to which joining costs more than it saves


async def read_ahead(stream: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """Yields the stream's chunks, some joined. The stream is read as fast as it yields; leaving early closes it."""
    backlog = Backlog()
    reading = asyncio.create_task(backlog.fill(stream))
    try:
        while chunks := await backlog.take():
            for chunk in chunks:
                yield chunk
        await reading
    finally:
        await end(reading, timeout_s=CANCEL_TIMEOUT_S)


class Backlog:
    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._join_at = MIN_JOIN
        self._is_ended = False
        self._news = asyncio.Event()

    async def fill(self, stream: AsyncIterator[Chunk]) -> None:
        """Adds the whole stream. Raises what the stream raises."""
        try:
            async with closing_stream(stream) as chunks:
                async for chunk in chunks:
                    self.add(chunk)
        finally:
            self._is_ended = True
            self._news.set()

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        if len(self._chunks) >= self._join_at:
            self._chunks = join(self._chunks)
            self._join_at = 2 * len(self._chunks) + MIN_JOIN
        self._news.set()

    async def take(self) -> list[Chunk]:
        """Returns all waiting chunks, at least one; an empty list once the stream has ended or failed."""
        while not self._chunks and not self._is_ended:
            self._news.clear()
            await self._news.wait()
        chunks, self._chunks, self._join_at = join(self._chunks), [], MIN_JOIN
        return chunks


def join(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Joins successive pieces of a choice, so that there are fewer chunks. A tool call stays apart."""
    runs: list[list[Chunk]] = []
    newest: dict[int, list[Chunk]] = {}  # each choice's latest run
    for chunk in chunks:
        run = newest.get(chunk.choice.index)
        if run is None or run[-1].is_last or not _fit(run[-1].choice, chunk.choice):
            run = newest[chunk.choice.index] = []
            runs.append(run)
        run.append(chunk)
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _fit(first: Choice, second: Choice) -> bool:
    """Returns whether two pieces can be joined: neither calls a tool, and both report the same of their tokens."""
    if any("tool_calls" in (choice.message or ()) for choice in (first, second)):
        return False
    reported = [
        (choice.message is None, choice.raw_logprobs is None, choice.top_logprobs is None, len(choice.tokens))
        for choice in (first, second)
    ]
    return reported[0][:3] == reported[1][:3] and bool(reported[0][3]) == bool(reported[1][3])


def _joined(run: list[Chunk]) -> Chunk:
    """Returns one chunk from several chunks of one choice. `run` is not changed."""
    choices = [chunk.choice for chunk in run]
    choice = msgspec.structs.replace(
        choices[-1],
        message=None if choices[0].message is None else join_deltas(choice.message or {} for choice in choices),
        text="".join(choice.text for choice in choices),
        token_ids=_concat(choice.token_ids for choice in choices),
        logprobs=_concat(choice.logprobs for choice in choices),
        raw_logprobs=_concat(choice.raw_logprobs for choice in choices),
        tokens=_concat(choice.tokens for choice in choices) or [],
        top_logprobs=_concat(choice.top_logprobs for choice in choices),
        echo=next((choice.echo for choice in choices if choice.echo is not None), None),
        prompt_ids=next((choice.prompt_ids for choice in choices if choice.prompt_ids is not None), None),
        is_masked=any(choice.is_masked for choice in choices),
    )
    prompt_ids = next((chunk.prompt_ids for chunk in run if chunk.prompt_ids is not None), None)
    return msgspec.structs.replace(run[-1], choice=choice, prompt_ids=prompt_ids)


def _concat(lists: Iterable[list[Any] | None]) -> Any:
    """Returns the lists as one; None if all are None."""
    found = [part for part in lists if part is not None]
    return [item for part in found for item in part] if found else None


class Dispatch:
    """Backend in front of the engines of all policies."""

    def __init__(self, policies: Policies, admission: Admission, meter: Meter, *, logs_content: bool) -> None:
        self._policies, self._admission, self._meter = policies, admission, meter
        self._logs_content = logs_content

    def models(self) -> list[str]:
        """Returns the models' names. Raises ChatError 503 until calls are answered."""
        self._admission.check_loaded()
        return list(self._policies.served)

    async def reply(self, request: Request) -> Reply:
        async with self._engine(request) as (backend, filled, step):
            reply = await backend.reply(filled)
            reply.policy = await self._policies.served[request.model].proven.digest(reply.step)
            reply.step = reply.step if step is None else step
        self._count(request, *reply.num_tokens)
        if self._logs_content:
            _log_content(request, reply)
        return reply

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yields the chunks at the client's speed. The slot is free once all is sampled, however slow the client is."""
        async with closing_stream(read_ahead(self._sample(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sample(self, request: Request) -> AsyncIterator[Chunk]:
        begin = time.perf_counter()
        builder = ReplyBuilder(request) if self._logs_content else None
        num_prompt = num_sampled = 0
        usage: tuple[int, int] | None = None  # the endpoint's counts, if it gives no ids
        try:
            async with (
                self._engine(request) as (backend, filled, step),
                closing_stream(backend.stream(filled)) as chunks,
            ):
                async for chunk in chunks:
                    chunk.policy = await self._policies.served[request.model].proven.digest(chunk.step)
                    chunk.step = chunk.step if step is None else step
                    if chunk.choice.token_ids and not num_sampled:
                        self._meter.first_token_s.observe(time.perf_counter() - begin)
                    num_prompt += len(chunk.prompt_ids or ())
                    num_sampled += len(chunk.choice.token_ids)
                    usage = chunk.usage or usage
                    if builder is not None:
                        builder.add(chunk)
                    yield chunk
        finally:  # tokens sampled for a client that went away count too
            self._count(request, *(usage if usage is not None and not num_prompt else (num_prompt, num_sampled)))
        if builder is not None:
            _log_content(request, builder.reply())

    @contextlib.asynccontextmanager
    async def _engine(self, request: Request) -> AsyncIterator[tuple[Backend, Request, int | None]]:
        """Yields the engine that answers, once it has a free slot, and the request with its policy's defaults.

        The third is the step of a policy that is a prompt, which its engine does not have; None for weights.
        """
        policy = self._policies.served[request.model]
        async with self._admission.slot():
            with policy.lease() as backend:
                yield backend, policy.fill(request), policy.source.step if policy.source.prompt is not None else None

    def _count(self, request: Request, num_prompt: int, num_sampled: int) -> None:
        self._meter.prompt_tokens.labels(request.model).inc(num_prompt)
        self._meter.sampled_tokens.labels(request.model).inc(num_sampled)


def _log_content(request: Request, reply: Reply) -> None:
    asked = request.prompt if request.messages is None else request.messages
    answered = [choice.message or choice.text for choice in reply.choices]
    content = {"model": request.model, "step": reply.step, "asked": asked, "answered": answered}
    log.info("content %s", msgspec.json.encode(content).decode())


GRACE_S = 1  # longest wait for connections to close; requests have had `drain_s` before
ESCAPED = 6  # bytes of the longest way in which JSON writes a character: \u0041
ASIDE_BYTES = 2 * 2**20  # room in a body for schemas of answers, and for thoughts that a chat template drops


@dataclass(frozen=True)
class Limits:
    concurrency: int = 256  # requests at the engine at once
    queue: int = 1024  # more requests in flight
    max_body_bytes: int = BodyLimit().num_bytes
    body_timeout_s: float = BODY_TIMEOUT_S
    drain_s: float = 30.0  # longest wait for requests in flight when the service stops
    timeouts: Timeouts = field(default_factory=Timeouts)


class Service:
    """Serves `policies`. With `follows`, each follows that checkpoint of its run; with `is_processed`, clients get the
    logprobs of the distribution sampled from."""

    def __init__(
        self,
        policies: Policies,
        *,
        keys: Keys,
        limits: Limits,
        follows: Which | None = None,
        logs_content: bool = False,
        is_processed: bool = False,
    ) -> None:
        self.policies, self.keys, self.limits = policies, keys, limits
        self.admission = Admission(concurrency=limits.concurrency, queue=limits.queue)
        self.meter = self._metered()
        self._follows = follows
        self._stopping = Stopping(
            limits.drain_s, refuse=self.admission.drain, num_running=lambda: self.admission.num_in_flight
        )
        dispatch = Dispatch(policies, self.admission, self.meter, logs_content=logs_content)
        app = build_app(
            lambda key: dispatch,  # the middleware has checked the key
            body_limit=self._body_limit,
            body_timeout_s=limits.body_timeout_s,
            is_processed=is_processed,
            policy_of=lambda name: policies.served[name].proven.newest,
            more=[
                *(Route(path, self._ready, methods=["GET"]) for path in READY),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
        )
        self.app = Middleware(app, keys, self.admission, self.meter)

    def _metered(self) -> Meter:
        """Returns a meter whose gauges read this service."""
        meter, admission = Meter(), self.admission
        meter.in_flight.set_function(lambda: admission.num_in_flight)
        meter.answering.set_function(lambda: admission.num_answering)
        meter.ready.set_function(lambda: admission.state == "open")
        for name, policy in self.policies.served.items():
            meter.step.labels(name).set_function(partial(_step_of, policy))
        return meter

    async def run(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serves until `stop` is called; `on_ready` gets the root, `http://127.0.0.1:8000`.

        Raises EngineError: the address is not available, or an engine failed; ArtError: a policy cannot be loaded.
        """
        async with serve(self.app, host, port, timeouts=self.limits.timeouts, grace_s=GRACE_S) as root:
            with threads.calling(self._stopping.stop):
                try:
                    if await self._stopping.ends_before(self.policies.start()) and not self._stopping.is_stopped:
                        self.admission.open()
                        on_ready(root)
                        log.info("ready: calls are answered at %s/v1", root)
                        async with self._followers():
                            await self._stopping.ends_before(self.policies.watch())
                    await self._stopping.drain(self.admission.emptied())
                finally:
                    await self.policies.close()

    def stop(self) -> None:
        """Refuses new requests, waits for those in flight, then ends. A second call ends the wait."""
        self._stopping.stop()

    # --- from start to end --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _followers(self) -> AsyncIterator[None]:
        tasks = []
        for policy in self.policies.served.values() if self._follows else ():
            assert self._follows and policy.source.run is not None, "only a run can be followed"
            work = follow(policy, policy.source.run, self.meter, which=self._follows)
            tasks.append(asyncio.create_task(work))
        try:
            yield
        finally:
            await cancel(*tasks)

    def _body_limit(self) -> BodyLimit:
        """Returns the limit that the user set, or a lower one if no longer body holds a prompt that fits here."""
        letters = [policy.longest_prompt() for policy in self.policies.served.values()]
        most = self.limits.max_body_bytes
        known = [number for number in letters if number is not None]
        needed = ESCAPED * max(known, default=0) + ASIDE_BYTES
        if len(known) < len(letters) or needed >= most:
            return BodyLimit(most, "art serve --max-body sets this limit")
        return BodyLimit(needed, "no longer prompt fits the model's context")

    # --- more routes --------------------------------------------------------------------------------------------------

    async def _ready(self, http: HttpRequest) -> Response:
        if self.admission.state != "open":
            error = ChatError(503, f"not ready: {self.admission.state}", code=self.admission.state)
            return error_response(error, WIRES.at(http.url.path, http.headers))
        models = [
            {"id": name, "step": policy.source.step} | ({"policy": digest} if (digest := policy.proven.newest) else {})
            for name, policy in self.policies.served.items()
        ]
        return _json({"status": "ready", "models": models})

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self.meter.render(), media_type=CONTENT_TYPE)


def _step_of(policy: ServedPolicy) -> float:
    return policy.source.step


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
