"""Backlog: sampled chunks that a client has not read yet.

    engine's stream -> background task -> Backlog -> application, at the client's speed

Sampling never waits for a client. Waiting chunks are joined, so a backlog is never larger than the whole reply
unstreamed (about 100 bytes per token), and a slow client gets fewer, longer chunks.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from art_cli.chat.replies import Choice, Chunk, join_deltas
from art_cli.runtime.threads import end

CANCEL_TIMEOUT_S = 10.0  # timeout for a backend to release a cancelled request's resources
MIN_JOIN = 64  # joining fewer chunks costs more time than it saves


async def read_ahead(stream: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """Yields the stream's chunks, some joined. Reads the stream as fast as possible, and closes it on early exit."""
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

    async def fill(self, stream: AsyncGenerator[Chunk]) -> None:
        """Adds the whole stream. Raises the stream's errors."""
        try:
            async with aclosing(stream) as chunks:
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
        """Returns all waiting chunks, waiting for at least one. [] means the stream has ended or failed."""
        while not self._chunks and not self._is_ended:
            self._news.clear()
            await self._news.wait()
        chunks, self._chunks, self._join_at = join(self._chunks), [], MIN_JOIN
        return chunks


def join(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Joins successive chunks of a choice. Chunks with tool calls stay separate."""
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
    """Returns True for joinable chunks: no tool calls, and the same kinds of token data."""
    if any("tool_calls" in (choice.message or ()) for choice in (first, second)):
        return False
    reported = [
        (choice.message is None, choice.raw_logprobs is None, choice.top_logprobs is None, len(choice.tokens))
        for choice in (first, second)
    ]
    return reported[0][:3] == reported[1][:3] and bool(reported[0][3]) == bool(reported[1][3])


def _joined(run: list[Chunk]) -> Chunk:
    """Returns a single chunk from several chunks of a choice. `run` is not changed."""
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
    found = [part for part in lists if part is not None]
    return [item for part in found for item in part] if found else None
