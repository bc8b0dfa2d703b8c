"""OpenAICompletions: OpenAI's plain completions as a wire. A request has one prompt, as text or as token ids.

https://platform.openai.com/docs/api-reference/completions
"""

from typing import Annotated, cast

import msgspec
from msgspec import Meta

from art_cli.chat.errors import invalid
from art_cli.chat.replies import Choice, Reply, token_text
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires.openai import (
    INT32,
    LOWEST_LOGPROB,
    Body,
    Count,
    Json,
    OpenAI,
    OpenAIEvents,
    parse_body,
    reported_logprobs,
    sampling_of,
    token_fields,
    tokens_of,
    wanted_usage,
)

_TokenId = Annotated[int, Meta(ge=0, le=INT32)]


class CompletionBody(Body, kw_only=True):
    """The JSON body of a request for a plain completion."""

    prompt: str | list[_TokenId | str | list[_TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None


class OpenAICompletions(OpenAI):
    path = "/v1/completions"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        """The request in a JSON body. Raises ChatError 400."""
        _, text = parse_body(body, CompletionBody)
        prompt = _prompt(text.prompt)
        if text.echo and (text.logprobs is not None or not isinstance(prompt, str)):
            raise invalid("echo goes with a text prompt and without logprobs", "echo")
        if text.best_of not in (None, text.n or 1):
            raise invalid("best_of: this endpoint returns all that it samples; only n itself", "best_of")
        sampling = sampling_of(text, text.max_tokens)
        return Request(
            model=text.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            prompt=prompt,
            is_stream=bool(text.stream),
            **wanted_usage(text),
            wants_logprobs=text.logprobs is not None,
            top_logprobs=text.logprobs or 0,
            wants_token_ids=bool(text.return_token_ids),
            echo=bool(text.echo),
            user_set=frozenset(sampling),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        """The JSON body of a text_completion."""
        choices = [
            {
                "index": choice.index,
                "text": f"{request.prompt}{choice.text}" if request.echo else choice.text,
                "logprobs": _logprobs(request, choice, 0) if request.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
                **token_fields(request, choice),
            }
            for choice in reply.choices
        ]
        return self._body("text_completion", request, reply, choices)

    def stream(self, request: Request) -> "_TextEvents":
        return _TextEvents(self, request)


def _prompt(value: str | list[int | str | list[int]]) -> str | list[int]:
    """The one prompt of a plain completion: text or token ids, alone or as the only item of a list."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise invalid("prompt: one prompt per request; send the others as requests of their own", "prompt")
        value = cast("str | list[int | str | list[int]]", value[0])
    if not value:
        raise invalid("prompt: empty", "prompt")
    if isinstance(value, list) and not all(isinstance(token, int) for token in value):
        raise invalid("prompt: text, or a list of token ids", "prompt")
    return cast("str | list[int]", value)


# --- the reply --------------------------------------------------------------------------------------------------------


def _logprobs(request: Request, choice: Choice, offset: int) -> Json:
    """Parallel lists, one item a token; the choice's text begins `offset` characters into the answer."""
    offsets, tokens = [], [token_text(token) for token in tokens_of(choice)]
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = choice.top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": [max(logprob, LOWEST_LOGPROB) for logprob in reported_logprobs(request, choice)],
        "top_logprobs": [_top_texts(top) for top in tops] if tops else None,
        "text_offset": offsets,
    }


def _top_texts(top: list[tuple[str, float]]) -> dict[str, float]:
    """Logprobs by text. When several tokens have the same text, the likeliest, which is the first, is kept."""
    texts: dict[str, float] = {}
    for token, logprob in top:
        texts.setdefault(token_text(token), max(logprob, LOWEST_LOGPROB))
    return texts


class _TextEvents(OpenAIEvents):
    kind = "text_completion"

    def __init__(self, wire: OpenAI, request: Request) -> None:
        super().__init__(wire, request)
        self._offsets: dict[int, int] = {}  # choice index -> number of characters of tokens sent

    def first_content(self) -> Json:
        return {"text": self._request.prompt} if self._request.echo else {}

    def content(self, choice: Choice) -> Json:
        return {"text": choice.text}

    def logprobs(self, choice: Choice) -> Json:
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(len(token_text(token)) for token in tokens_of(choice))
        return _logprobs(self._request, choice, offset)
