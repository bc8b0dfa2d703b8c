"""OpenAICompletions: the wire for OpenAI's plain completions. Prompts are text or token ids; requests may have several.

https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from art_cli.chat.chat_errors import invalid
from art_cli.chat.replies import Choice, Reply, token_text
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.chat.wires import openai_shared

MAX_PROMPTS = 128  # maximum prompts per request
MAX_CHOICES = 512  # maximum choices for all prompts of a request
MAX_ECHOED = 2**20  # logprobs of prompts in one answer, about 100 bytes each
_TOKEN_CHARACTERS = 3  # characters of text counted as one token
_Tops = Sequence[list[tuple[str, float]] | None] | None  # per token: (text, logprob) of the likeliest tokens
_TokenId = Annotated[int, Meta(ge=0, le=openai_shared.INT32)]


class CompletionBody(openai_shared.Body, kw_only=True):
    prompt: str | list[_TokenId | str | list[_TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=openai_shared.INT32)] | None = (
        None  # 0: with `echo`, the prompt's logprobs alone
    )
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: openai_shared.Count | None = None


class OpenAICompletions(openai_shared.OpenAI):
    path = "/v1/completions"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        _, text = openai_shared.parse_body(body, CompletionBody)
        first, *others = prompts = _prompts(text.prompt)
        _check_size(prompts, text)
        if text.best_of not in (None, text.n or 1):
            raise invalid("best_of: it must equal n, because this endpoint returns all samples", "best_of")
        sampling = openai_shared.sampling_of(text, text.max_tokens)
        return Request(
            model=text.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            prompt=first,
            more_prompts=others,
            is_stream=bool(text.stream),
            **openai_shared.wanted_usage(text),
            wants_logprobs=text.logprobs is not None,
            top_logprobs=text.logprobs or 0,
            wants_token_ids=bool(text.return_token_ids),
            echo=bool(text.echo),
            user_set=frozenset(sampling),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        choices = []
        for choice in reply.choices:
            fields: Json = {
                "index": choice.index,
                "text": _echo_text(request, choice) + choice.text,
                "logprobs": _whole_logprobs(request, choice) if request.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
                **openai_shared.token_fields(request, choice),
            }
            if request.wants_token_ids:
                fields["prompt_token_ids"] = reply.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
            choices.append(fields)
        return self._body("text_completion", request, reply, choices)

    def stream(self, request: Request) -> "_TextEvents":
        return _TextEvents(self, request)


def _prompts(value: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """Returns a request's prompts, each text or token ids. Raises ChatError 400."""
    is_list = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    prompts = cast("list[int | str | list[int | str | list[int]]]", value if is_list else [value])
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS}", "prompt")
    for prompt in prompts:
        if prompt in ("", []):
            raise invalid("prompt: empty", "prompt")
        if isinstance(prompt, int) or (isinstance(prompt, list) and not all(isinstance(id, int) for id in prompt)):
            raise invalid("prompt: text, a list of token ids, or a list of these", "prompt")
    return cast("list[str | list[int]]", prompts)


def _check_size(prompts: list[str | list[int]], text: CompletionBody) -> None:
    """Raises ChatError 400: the answer to all prompts would be too large."""
    n = text.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise invalid(f"prompt: {len(prompts)} prompts of {n} choices; at most {MAX_CHOICES} choices", "prompt")
    if text.echo and text.logprobs is not None:
        tokens = sum(len(each) // _TOKEN_CHARACTERS if isinstance(each, str) else len(each) for each in prompts)
        if tokens * n * (1 + text.logprobs) > MAX_ECHOED:
            raise invalid(
                "prompt: too many logprobs in one answer; ask for fewer prompts, choices or logprobs", "prompt"
            )


# --- the reply --------------------------------------------------------------------------------------------------------


def _echo_text(request: Request, choice: Choice) -> str:
    """Returns the prompt before the choice's text. Raises ChatError 400 if the backend repeats no token ids."""
    if not request.echo:
        return ""
    if choice.echo is None and not isinstance(request.prompt, str):
        raise invalid("echo: the upstream endpoint does not echo token ids", "echo")
    return choice.echo.text if choice.echo is not None else str(request.prompt)


def _whole_logprobs(request: Request, choice: Choice) -> Json:
    """Returns the logprobs of the choice, after the logprobs of an echoed prompt."""
    sampled = _logprobs(request, choice, len(_echo_text(request, choice)))
    if not request.echo:
        return sampled
    echo = _echo_logprobs(choice)
    return {name: echo[name] + sampled[name] if sampled[name] is not None else echo[name] for name in sampled}


def _echo_logprobs(choice: Choice) -> Json:
    """Returns the prompt's lists, whose first logprob is null. Raises ChatError 400: the backend reports none."""
    echo = choice.echo
    if echo is None or not echo.tokens:
        raise invalid("echo: the upstream endpoint reports no prompt logprobs", "echo")
    return _lists(echo.tokens, echo.logprobs, echo.top_logprobs, echo.offsets)


def _logprobs(request: Request, choice: Choice, offset: int) -> Json:
    """Returns the lists of a choice whose text begins `offset` characters into the answer."""
    tokens, offsets = openai_shared.tokens_of(choice), list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(token_text(token))
    return _lists(tokens, openai_shared.reported_logprobs(request, choice), choice.top_logprobs or None, offsets)


def _lists(tokens: list[str], logprobs: Sequence[float | None], tops: _Tops, offsets: list[int]) -> Json:
    """Returns the parallel lists of plain completions, with one item per token."""
    texts = [token_text(token) for token in tokens]
    rows = [] if tops is None else zip(texts, logprobs, tops, strict=True)
    likeliest = [None if top is None else _top_texts(text, logprob or 0.0, top) for text, logprob, top in rows]
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else max(each, openai_shared.LOWEST_LOGPROB) for each in logprobs],
        "top_logprobs": None if tops is None else likeliest,
        "text_offset": offsets,
    }


def _top_texts(token: str, logprob: float, top: list[tuple[str, float]]) -> dict[str, float]:
    """Returns the top tokens' logprobs by text; the likeliest of equal texts. The actual token is always included."""
    texts: dict[str, float] = {}
    for text, value in [*((token_text(each), value) for each, value in top), (token, logprob)]:
        texts.setdefault(text, max(value, openai_shared.LOWEST_LOGPROB))
    return texts


class _TextEvents(openai_shared.OpenAIEvents):
    kind = "text_completion"

    def __init__(self, wire: openai_shared.OpenAI, request: Request) -> None:
        super().__init__(wire, request)
        self._offsets: dict[int, int] = {}  # choice index -> number of characters of tokens sent

    def first_content(self, choice: Choice) -> Json:
        if not self._request.echo:
            return {}
        text = _echo_text(self._request, choice)
        self._offsets[choice.index] = len(text)
        return {"text": text, **({"logprobs": _echo_logprobs(choice)} if self._request.wants_logprobs else {})}

    def with_prompt(self, event: Json, prompt_ids: list[int]) -> Json:
        return {**event, "choices": [{**choice, "prompt_token_ids": prompt_ids} for choice in event["choices"]]}

    def content(self, choice: Choice) -> Json:
        return {"text": choice.text}

    def logprobs(self, choice: Choice) -> Json:
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(len(token_text(token)) for token in openai_shared.tokens_of(choice))
        return _logprobs(self._request, choice, offset)
