"""Dispatch: takes a request to its policy's engine. It waits for a slot, counts tokens, and logs content if asked."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from art_cli.chat import Backend
from art_cli.chat.chat_app import closing_stream
from art_cli.chat.replies import Chunk, Reply, ReplyBuilder
from art_cli.chat.requests import Request, with_defaults
from art_cli.serving.admission import Admission
from art_cli.serving.backlog import read_ahead
from art_cli.serving.meter import Meter
from art_cli.serving.served_policies import Policies

log = logging.getLogger(__name__)


class Dispatch:
    """Backend in front of the engines of all policies."""

    def __init__(self, policies: Policies, admission: Admission, meter: Meter, *, logs_content: bool) -> None:
        self._policies, self._admission, self._meter = policies, admission, meter
        self._logs_content = logs_content

    def models(self) -> list[str]:
        return list(self._policies.served)

    async def reply(self, request: Request) -> Reply:
        async with self._engine(request) as (backend, filled):
            reply = await backend.reply(filled)
        num_sampled = sum(len(choice.token_ids) for choice in reply.choices)
        self._count(request, len(reply.prompt_ids), num_sampled)
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
        try:
            async with self._engine(request) as (backend, filled), closing_stream(backend.stream(filled)) as chunks:
                async for chunk in chunks:
                    if chunk.choice.token_ids and not num_sampled:
                        self._meter.first_token_s.observe(time.perf_counter() - begin)
                    num_prompt += len(chunk.prompt_ids or ())
                    num_sampled += len(chunk.choice.token_ids)
                    if builder is not None:
                        builder.add(chunk)
                    yield chunk
        finally:  # tokens sampled for a client that went away count too
            self._count(request, num_prompt, num_sampled)
        if builder is not None:
            _log_content(request, builder.reply())

    @contextlib.asynccontextmanager
    async def _engine(self, request: Request) -> AsyncIterator[tuple[Backend, Request]]:
        """Yields the engine that answers, once it has a free slot, and the request with its policy's defaults."""
        policy = self._policies.served[request.model]
        async with self._admission.slot():
            with policy.lease() as backend:
                yield backend, with_defaults(request, policy.source.defaults)

    def _count(self, request: Request, num_prompt: int, num_sampled: int) -> None:
        self._meter.prompt_tokens.labels(request.model).inc(num_prompt)
        self._meter.sampled_tokens.labels(request.model).inc(num_sampled)


def _log_content(request: Request, reply: Reply) -> None:
    asked = request.prompt if request.messages is None else request.messages
    answered = [choice.message or choice.text for choice in reply.choices]
    content = {"model": request.model, "step": reply.step, "asked": asked, "answered": answered}
    log.info("content %s", msgspec.json.encode(content).decode())
