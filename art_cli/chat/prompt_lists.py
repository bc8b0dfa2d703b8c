"""PromptList: a Backend for requests with several prompts, in front of one for requests with one.

Each prompt is a separate request, all at once, so that admission, recording and engines know no lists. The choices of
prompt number i, of n each, have the indices i * n to i * n + n - 1, as OpenAI's do.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from art_cli.chat import Backend
from art_cli.chat.replies import Choice, Chunk, Echo, Reply
from art_cli.chat.requests import Request
from art_cli.runtime.threads import end

CANCEL_TIMEOUT_S = 10.0  # longest wait for the other prompts to end when one has failed or the client has gone


_News = tuple[int, Chunk | Exception | None]  # a chunk of one prompt, its failure, or its end


class PromptList:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def models(self) -> list[str]:
        return self._backend.models()

    async def reply(self, request: Request) -> Reply:
        requests = _parts(request)
        tasks = [asyncio.create_task(self._backend.reply(part)) for part in requests]
        try:
            replies = await asyncio.gather(*tasks)
        finally:
            await end(*tasks, timeout_s=CANCEL_TIMEOUT_S)
        counts = [reply.num_tokens for reply in replies]
        choices = [
            _placed(choice, part, number, reply.prompt_ids)
            for number, (part, reply) in enumerate(zip(requests, replies, strict=True))
            for choice in reply.choices
        ]
        return msgspec.structs.replace(
            replies[0],
            choices=choices,
            step=min(reply.step for reply in replies),
            usage=(sum(num for num, _ in counts), sum(num for _, num in counts)),
        )

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yields the chunks of all prompts as they come. A chunk's `usage` counts the prompts that have reported it."""
        requests = _parts(request)
        chunks: asyncio.Queue[_News] = asyncio.Queue(maxsize=1)  # so that prompts wait for a slow client
        tasks = [asyncio.create_task(self._read(part, number, chunks)) for number, part in enumerate(requests)]
        usages: dict[int, tuple[int, int]] = {}
        name, num_open = "", len(tasks)
        try:
            while num_open:
                number, chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is None:
                    num_open -= 1
                    continue
                name = name or chunk.id
                if chunk.usage is not None:
                    usages[number] = chunk.usage
                    chunk.usage = sum(u[0] for u in usages.values()), sum(u[1] for u in usages.values())
                chunk.id = name
                chunk.choice = _placed(chunk.choice, requests[number], number, chunk.prompt_ids)
                yield chunk
        finally:
            await end(*tasks, timeout_s=CANCEL_TIMEOUT_S)

    async def _read(self, request: Request, number: int, chunks: "asyncio.Queue[_News]") -> None:
        stream = self._backend.stream(request)
        last: Exception | None = None
        try:
            async for chunk in stream:
                await chunks.put((number, chunk))
        except Exception as error:  # the boundary of this task; the stream raises it
            last = error
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()
        await chunks.put((number, last))


def _parts(request: Request) -> list[Request]:
    """Returns a request for each prompt. Each has another digest, so that none is taken for a retry of another."""
    assert request.prompt is not None, "chat has no prompts"
    return [
        msgspec.structs.replace(
            request, prompt=prompt, more_prompts=[], digest=request.digest and request.digest + b"%d" % number
        )
        for number, prompt in enumerate([request.prompt, *request.more_prompts])
    ]


def _placed(choice: Choice, request: Request, number: int, prompt_ids: list[int] | None) -> Choice:
    """Returns the choice at its index among those of all prompts, with its own prompt."""
    echo = choice.echo
    if request.echo and echo is None and isinstance(request.prompt, str):
        echo = Echo(text=request.prompt)
    index = number * request.sampling.n + choice.index
    return msgspec.structs.replace(choice, index=index, echo=echo, prompt_ids=prompt_ids)
