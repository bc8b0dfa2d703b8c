"""Dispatch: sends each request to its policy's engine. It waits for a free slot, counts tokens and can log content."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from art_cli.chat import Backend
from art_cli.chat.replies import Chunk, Reply, ReplyBuilder
from art_cli.chat.requests import Request
from art_cli.serving.backlog import read_ahead
from art_cli.serving.middleware import Admission, Meter
from art_cli.serving.served_policies import Policies

log = logging.getLogger(__name__)


class Dispatch:
    """A Backend in front of all policies' engines."""

    def __init__(self, policies: Policies, admission: Admission, meter: Meter, *, logs_content: bool) -> None:
        self._policies, self._admission, self._meter = policies, admission, meter
        self._logs_content = logs_content

    def models(self) -> list[str]:
        """Returns the models' names. Raises ChatError 503 while loading."""
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

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Yields chunks at the client's speed. The slot is freed when sampling ends, even if the client is slow."""
        async with contextlib.aclosing(read_ahead(self._sample(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sample(self, request: Request) -> AsyncGenerator[Chunk]:
        begin = time.perf_counter()
        builder = ReplyBuilder(request) if self._logs_content else None
        num_prompt = num_sampled = 0
        usage: tuple[int, int] | None = None  # the endpoint's token counts, if it returns no token ids
        try:
            async with (
                self._engine(request) as (backend, filled, step),
                contextlib.aclosing(backend.stream(filled)) as chunks,
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
        finally:  # also count tokens for clients that disconnected
            self._count(request, *(usage if usage is not None and not num_prompt else (num_prompt, num_sampled)))
        if builder is not None:
            _log_content(request, builder.reply())

    @contextlib.asynccontextmanager
    async def _engine(self, request: Request) -> AsyncIterator[tuple[Backend, Request, int | None]]:
        """Waits for a slot. Yields the engine, the request with defaults, and a prompt's step (None for weights)."""
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
