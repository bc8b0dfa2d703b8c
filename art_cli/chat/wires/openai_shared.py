"""Shared by OpenAI's protocols: key, error body, sampling parameters, usage.

Each parameter is supported, harmless to ignore, or an error. In addition to OpenAI's parameters, clients may send
vLLM's `top_k`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `return_token_ids`, and `chat_template_kwargs`. A
reply to a request with `return_token_ids` has vLLM's fields `prompt_token_ids` (in each choice of a plain completion),
`choices[].token_ids` and `choices[].stop_reason` (the stop string that ended it), and three more: `step`, the policy's
step, `choices[].raw_logprobs`, each token's logprob under the unmodified softmax(logits), and
`choices[].sampled_logprobs`, the logprob under the sampled distribution.
`logprobs` has the raw logprobs, as in vLLM (`reported_logprobs`).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers

from art_cli.chat.api_keys import bearer
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.replies import Choice, Chunk, Reply, token_bytes, token_text
from art_cli.chat.requests import MIN_TEMPERATURE, RENDERERS_OWN, Json, Request, Sampling

# Limits without a source in the protocol keep hostile numbers from reaching tensors: ids and counts fit 32 bits.
INT32 = 2**31 - 1
LOWEST_LOGPROB = -9999.0  # OpenAI's and vLLM's number for -inf, which JSON cannot express
Count = Annotated[int, Meta(ge=1, le=INT32)]
Name = Annotated[str, Meta(max_length=1024)]  # bounded because errors repeat it
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT32)]  # vLLM's parameter; 0 and -1 turn it off
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]  # limited, because every token is checked for it

_MAX_VARIABLES = 16 * 1024  # characters of chat_template_kwargs as JSON
_MAX_VARIABLE = 1_000_000  # largest number in chat_template_kwargs; a template may repeat a text that often

# Parameters accepted and ignored: they identify, bill, or cache, or request something that the model does anyway.
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "reasoning_effort", "verbosity"),
    }
)
# Parameters accepted only with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
}


# --- the request ------------------------------------------------------------------------------------------------------


class PlainFormat(msgspec.Struct, tag="text"):
    """Any text."""


class ObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct):
    schema: Json
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # True: exactly; otherwise as far as a grammar can express the schema


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's parameter
    include_obfuscation: bool | None = None  # harmless: it only pads OpenAI's events


class Body(msgspec.Struct, kw_only=True):
    """The parameters that chat and plain completions share; null means that the client gave none."""

    model: Name
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Count | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None  # vLLM's parameter
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32)] | None = None  # vLLM's parameter
    ignore_eos: bool | None = None  # vLLM's parameter
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None  # vLLM's parameter


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(body: bytes, kind: type[AnyBody]) -> tuple[Json, AnyBody]:
    """Returns a JSON body's fields in raw and validated form. Raises ChatError 400."""
    fields = decode_object(body)
    checked = convert(fields, kind)
    check_names(fields, kind, HARMLESS, NEUTRAL)
    check_names(fields.get("stream_options") or {}, _StreamOptions, frozenset(), {}, where="stream_options.")
    return fields, checked


def check_names(
    fields: Json,
    kind: type[msgspec.Struct],
    harmless: frozenset[str],
    neutral: Mapping[str, tuple[Any, ...]],
    where: str = "",
) -> None:
    """Raises ChatError 400 with the names of all unknown fields that are neither harmless nor neutral.

    `where` is the path of the object that has the fields, with a dot.
    """
    given = {name for name, value in fields.items() if value is not None}  # clients send null for what they leave out
    others = sorted(given - set(kind.__struct_fields__) - harmless)
    unknown = [f"{where}{name[:80]}" for name in others if name not in neutral]
    known = [name for name in others if name in neutral]
    unsupported = [name for name in known if isinstance(fields[name], bool) or fields[name] not in neutral[name]]
    problems = []
    if unknown:
        problems.append(f"unknown parameter{'s' if len(unknown) > 1 else ''}: {', '.join(map(repr, unknown))}")
    if unsupported:
        pronoun = "them" if len(unsupported) > 1 else "it"
        problems.append(f"{', '.join(unsupported)}: this endpoint does not support {pronoun}")
    if problems:
        code = "unknown_parameter" if unknown else "unsupported_parameter"
        raise invalid("; ".join(problems), (unknown or unsupported)[0], code)


def given_sampling(body: msgspec.Struct, **named: Any) -> Json:
    """Returns the settings that the client gave, with the names of `Sampling`.

    `named` holds settings that have another name or form in the body. Raises ChatError 400 for a tiny temperature.
    """
    given = {name: getattr(body, name, None) for name in Sampling.__struct_fields__} | named
    if given["temperature"] is not None and 0 < given["temperature"] < MIN_TEMPERATURE:
        raise invalid(f"temperature: 0 (greedy) or at least {MIN_TEMPERATURE}", "temperature")
    if given["top_k"] is not None:
        given["top_k"] = max(given["top_k"], 0)
    return {name: value for name, value in given.items() if value is not None}


def sampling_of(body: Body, max_tokens: int | None) -> Json:
    """Returns the settings of a chat or plain completion that the client gave, with the names of `Sampling`."""
    if None not in (body.min_tokens, max_tokens) and (body.min_tokens or 0) > (max_tokens or 0):
        raise invalid("min_tokens: more than max_tokens", "min_tokens")
    stop, bias = body.stop, body.logit_bias
    return given_sampling(
        body,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else None if stop is None else tuple(stop),
        logit_bias=None if bias is None else tuple(map(_bias, bias.items())),
    )


def tool_choice_of(choice: str | None, name: str | None, tools: Collection[str]) -> str | Json:
    """Returns a tool choice in chat format; `name` is the named tool. Raises ChatError 400 if a tool is missing."""
    if name is not None:
        if name not in tools:
            raise invalid(f"tool_choice: no tool is named {name!r}", "tool_choice")
        return {"type": "function", "function": {"name": name}}
    if choice in ("required", "any"):
        if not tools:
            raise invalid(f"tool_choice: {choice!r} needs tools", "tool_choice")
        return "required"
    return choice or "auto"


def _bias(pair: tuple[str, float]) -> tuple[int, float]:
    """Returns the token id and its bias. Raises ChatError 400 for an invalid token id."""
    token = pair[0]
    if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= INT32):
        raise invalid(f"logit_bias: {token[:80]!r} is not a token id", "logit_bias")
    return int(token), pair[1]


def wanted_usage(body: Body) -> Json:
    """Returns the Request fields that control a stream's usage reports."""
    options = body.stream_options
    if options is None:
        return {}
    if not body.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    wants = bool(options.include_usage)
    return {"wants_usage": wants, "wants_running_usage": wants and bool(options.continuous_usage_stats)}


def template_kwargs(variables: Json) -> Json:
    """Returns the variables for the chat template. The backend checks which variables the template supports."""
    for name in variables:
        if name in RENDERERS_OWN:
            param = f"chat_template_kwargs.{name}"
            raise invalid(f"{param}: only variables of the model's own chat template can be set", param)
    if len(msgspec.json.encode(variables)) > _MAX_VARIABLES:
        raise invalid(f"chat_template_kwargs: more than {_MAX_VARIABLES} characters", "chat_template_kwargs")
    if not all(abs(number) <= _MAX_VARIABLE for number in _numbers(variables)):
        raise invalid(f"chat_template_kwargs: a number beyond {_MAX_VARIABLE:,}", "chat_template_kwargs")
    return variables


def _numbers(value: Any) -> Iterator[int | float]:
    """Yields the numbers in a JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


# --- the reply --------------------------------------------------------------------------------------------------------


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def token_fields(request: Request, choice: Choice) -> Json:
    """Returns the fields of a choice for a request with `return_token_ids`."""
    if not request.wants_token_ids:
        return {}
    return {
        "token_ids": choice.token_ids,
        "raw_logprobs": choice.raw_logprobs,
        "sampled_logprobs": choice.logprobs,
        "stop_reason": choice.stop_string,
    }


def usage(num_prompt: int, num_sampled: int) -> Json:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def tokens_of(choice: Choice) -> list[str]:
    """Returns each token as text; empty strings when the backend reports ids only."""
    return choice.tokens or [""] * len(choice.logprobs)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


def reported_logprobs(request: Request, choice: Choice) -> list[float]:
    """Returns the tokens' logprobs for the client, under the same distribution as the `top_logprobs`.

    The distribution is the model's softmax(logits), unless the server is configured to report the sampled distribution
    or the backend reports nothing else. Greedy tokens always get the model's logprob.
    """
    raw = choice.raw_logprobs
    wants_sampled = request.is_processed and request.sampling.temperature > 0
    return choice.logprobs if raw is None or wants_sampled else raw


def token_logprobs(request: Request, choice: Choice) -> list[TokenLogprob]:
    """Returns an entry per token. For a partial character, the entry has the partial bytes."""
    content = [
        TokenLogprob(token_text(token), max(logprob, LOWEST_LOGPROB), list(token_bytes(token)))
        for token, logprob in zip(tokens_of(choice), reported_logprobs(request, choice), strict=True)
    ]
    for entry, top in zip(content, choice.top_logprobs or (), strict=False):
        entry.top_logprobs = [
            TopLogprob(token_text(token), max(logprob, LOWEST_LOGPROB), list(token_bytes(token)))
            for token, logprob in top
        ]
    return content


class OpenAI:
    header = ""

    def key(self, headers: Headers) -> str | None:
        return bearer(headers)

    def error(self, error: ChatError) -> bytes:
        """`{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`"""
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return msgspec.json.encode({"error": fields})

    def status(self, error: ChatError) -> int:
        return error.status

    def _body(self, kind: str, request: Request, reply: Reply, choices: list[Json], **more: Any) -> bytes:
        counts = reply.num_tokens
        body: Json = {
            "id": reply.id,
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
            "usage": usage(*counts) if reply.is_counted else None,
        }
        if request.wants_token_ids:
            body["step"] = reply.step
        return msgspec.json.encode(body | more)


class OpenAIEvents:
    """The events of a stream: the start and pieces of each choice, then usage and [DONE].

    Subclasses render the start and pieces of a choice.
    """

    kind: str  # value of the field `object`

    def __init__(self, wire: OpenAI, request: Request) -> None:
        self._wire = wire
        self._request = request
        self._begun: set[int] = set()  # indices of choices whose first event was sent
        self._num_prompt = 0
        self._num_sampled = 0
        self._last: Chunk | None = None

    def render(self, chunk: Chunk) -> bytes:
        self._last = chunk
        self._num_prompt += len(chunk.prompt_ids or ())
        self._num_sampled += len(chunk.choice.token_ids)
        events = b""
        if chunk.choice.index not in self._begun:
            self._begun.add(chunk.choice.index)
            events = self._begin(chunk)
        content, request = self.content(chunk.choice), self._request
        wants_tokens = request.wants_logprobs or request.wants_token_ids
        has_tokens = wants_tokens and bool(chunk.choice.token_ids or chunk.choice.logprobs)
        if chunk.is_last or has_tokens or any(content.values()):
            has_logprobs = request.wants_logprobs and chunk.choice.logprobs
            piece = {
                "index": chunk.choice.index,
                **content,
                "logprobs": self.logprobs(chunk.choice) if has_logprobs else None,
                "finish_reason": chunk.choice.finish_reason if chunk.is_last else None,
                **token_fields(request, chunk.choice),
            }
            events += event(msgspec.json.encode(self._event_body(chunk, piece)))
        return events

    def finish(self) -> bytes:
        """Returns the usage chunk if requested and known, and the end of the stream."""
        done = event(b"[DONE]")
        if self._last is None or not self._request.wants_usage:
            return done
        if self._last.usage is None and not self._num_prompt + self._num_sampled:
            return done
        counts = usage(*(self._last.usage or (self._num_prompt, self._num_sampled)))
        return event(msgspec.json.encode({**self._head(self._last), "choices": [], "usage": counts})) + done

    def fail(self, error: ChatError) -> bytes:
        """Returns the error; no [DONE] follows."""
        return event(self._wire.error(error))

    def first_content(self, choice: Choice) -> Json:
        """Returns the content of a choice's first event; empty if no first event is needed."""
        raise NotImplementedError

    def with_prompt(self, event: Json, prompt_ids: list[int]) -> Json:
        """Returns a choice's first event, with the prompt's token ids if the protocol has them."""
        return {**event, "prompt_token_ids": prompt_ids}

    def content(self, choice: Choice) -> Json:
        """Returns a choice's new text, under the protocol's field name."""
        raise NotImplementedError

    def logprobs(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _begin(self, chunk: Chunk) -> bytes:
        """Returns a choice's first event, with the prompt's token ids."""
        prompt_ids = chunk.prompt_ids if self._request.wants_token_ids else None
        if not (content := self.first_content(chunk.choice)) and prompt_ids is None:
            return b""
        content = content or self.content(Choice(index=chunk.choice.index))
        choice = {"index": chunk.choice.index, "logprobs": None, **content, "finish_reason": None}
        body = self._event_body(chunk, choice)
        return event(msgspec.json.encode(body if prompt_ids is None else self.with_prompt(body, prompt_ids)))

    def _event_body(self, chunk: Chunk, choice: Json) -> Json:
        body = {**self._head(chunk), "choices": [choice]}
        if self._request.wants_running_usage:
            body["usage"] = usage(*(chunk.usage or (self._num_prompt, self._num_sampled)))
        return body

    def _head(self, chunk: Chunk) -> Json:
        step = {"step": chunk.step} if self._request.wants_token_ids else {}
        return {"id": chunk.id, "object": self.kind, "created": chunk.created, "model": chunk.model, **step}
