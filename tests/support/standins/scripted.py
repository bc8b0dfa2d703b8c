"""ScriptedBackend: a Backend whose tokens are characters and whose answers a test writes.

A conversation is rendered `<role>content\n` message by message and ends in `<assistant>`; token ids are code points,
the newline is the stop token. So an assistant message sent back continues the sequence it was sampled in, token for
token. Logprobs follow from the ids: -(id % 7 + 1) / 8.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request, text_of

Json = dict[str, Any]
Answer = str | Json  # text, or a whole assistant message


class Engine:
    """What the gateway needs of an engine."""

    def __init__(self, backend: "ScriptedBackend", model: str = "policy", step: int = 0) -> None:
        self.backend = backend
        self.endpoint = msgspec.defstruct("Endpoint", ["model", "step"])(model, step)


class ScriptedBackend:
    """Answers with what `answer(request)` gives, or awaits; an exception it raises is the backend's."""

    def __init__(
        self, answer: Callable[[Request], Answer | Awaitable[Answer]] = lambda request: "ok", model: str = "policy"
    ) -> None:
        self._answer = answer
        self._model = model
        self.requests: list[Request] = []
        self.was_cancelled = asyncio.Event()

    def models(self) -> list[str]:
        return [self._model]

    async def reply(self, request: Request) -> Reply:
        message = await self._ask(request)
        choices = [_choice(request, message, index) for index in range(request.sampling.n)]
        return Reply(
            id="reply-1",
            created=1,
            model=request.model,
            choices=choices,
            prompt_ids=prompt_ids(request),
            step=3,
            sampling=request.sampling,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """The reply a token at a time; a tool call comes in two pieces, its name and its arguments."""
        message = await self._ask(request)
        given: list[int] | None = prompt_ids(request)
        for index in range(request.sampling.n):
            whole = _choice(request, message, index)
            pieces = _pieces(whole)
            for place, piece in enumerate(pieces):
                is_last = place == len(pieces) - 1
                yield Chunk(
                    id="reply-1",
                    created=1,
                    model=request.model,
                    choice=piece,
                    is_last=is_last,
                    prompt_ids=given,
                    step=3,
                    sampling=request.sampling,
                )
                given = None
                await asyncio.sleep(0)

    async def _ask(self, request: Request) -> Json:
        self.requests.append(request)
        try:
            answer = self._answer(request)
            answer = await answer if inspect.isawaitable(answer) else answer
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


class BreakingBackend(ScriptedBackend):
    """Its streams end in an error after their first token."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        async for chunk in super().stream(request):
            yield chunk
            raise ChatError(503, "the engine died")


def tool_call(name: str, **arguments: Any) -> Json:
    """An assistant message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}],
    }


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def render(message: Json) -> str:
    calls = message.get("tool_calls") or []
    tail = "".join(f"{call['function']['name']}{call['function']['arguments']}" for call in calls)
    return text_of(message.get("content")) + tail


def prompt_ids(request: Request) -> list[int]:
    if request.messages is None:
        return encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt or [])
    turns = "".join(f"<{message['role']}>{render(message)}\n" for message in request.messages)
    return encode(turns + "<assistant>")


def logprob(token_id: int) -> float:
    return -(token_id % 7 + 1) / 8


def _choice(request: Request, message: Json, index: int) -> Choice:
    text = render(message)
    ids = encode(text) + [10]
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    if request.sampling.max_tokens is not None and request.sampling.max_tokens < len(ids):
        ids, finish_reason = ids[: request.sampling.max_tokens], "length"
        text = "".join(map(chr, ids))
        message = {"role": "assistant", "content": text}
    return Choice(
        index=index,
        message=message if request.messages is not None else None,
        text=text,
        token_ids=ids,
        logprobs=[logprob(id) for id in ids],
        raw_logprobs=[2 * logprob(id) for id in ids],
        tokens=[chr(id) for id in ids],
        top_logprobs=[[(chr(id), logprob(id))] for id in ids] if request.top_logprobs else None,
        finish_reason=finish_reason,
    )


def _pieces(whole: Choice) -> list[Choice]:
    """The choice a token at a time, each with its share of the message."""
    deltas: list[Json] = [{"content": token} for token in whole.tokens]
    if whole.finish_reason != "length":
        deltas[-1] = {}  # the stop token has no text
    if whole.message is not None and whole.message.get("tool_calls"):
        deltas = [{} for _ in whole.tokens]
        (call,) = whole.message["tool_calls"]
        deltas[0] = {"tool_calls": [{**call, "function": {"name": call["function"]["name"], "arguments": ""}}]}
        deltas[-1] = {"tool_calls": [{"index": 0, "function": {"arguments": call["function"]["arguments"]}}]}
    return [
        Choice(
            index=whole.index,
            message=delta if whole.message is not None else None,
            text="" if place == len(deltas) - 1 and whole.finish_reason != "length" else whole.tokens[place],
            token_ids=[whole.token_ids[place]],
            logprobs=[whole.logprobs[place]],
            raw_logprobs=[whole.raw_logprobs[place]] if whole.raw_logprobs is not None else None,
            tokens=[whole.tokens[place]],
            top_logprobs=[whole.top_logprobs[place]] if whole.top_logprobs is not None else None,
            finish_reason=whole.finish_reason,
        )
        for place, delta in enumerate(deltas)
    ]
