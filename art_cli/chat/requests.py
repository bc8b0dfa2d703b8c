"""What a client asks, in our words: one Request for chat and for plain completions.

`parse_request` (below) reads OpenAI's JSON; everything after it works on these records only. It refuses with a
ChatError of status 400 what it does not understand: a parameter is honoured, harmless to leave aside, or an error.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from art_cli.chat.errors import invalid
from art_cli.chat.reading import decode_object

Json = dict[str, Any]
Kind = Literal["chat", "text"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request. None in a client's request means: the endpoint's default."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None  # None: to the end of the context
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Exactly one of `messages` (chat) and `prompt` (plain completion) is set."""

    model: str
    sampling: Sampling
    messages: list[Json] | None = None  # as the client sent them
    prompt: str | list[int] | None = None
    tools: list[Json] = []
    tool_choice: str | Json = "auto"  # "auto", "none", "required", or a named function
    response_format: Json | None = None  # json_object or json_schema, as the client sent it; None: text
    template_kwargs: Json = {}  # chat_template_kwargs: {"enable_thinking": false}
    is_stream: bool = False
    wants_usage: bool = False  # stream_options.include_usage
    wants_logprobs: bool = False
    top_logprobs: int = 0
    wants_token_ids: bool = False  # vLLM's return_token_ids
    echo: bool = False  # the application puts the prompt before the text; backends leave it aside
    digest: bytes = b""  # of the body that it came in
    num_retries: int = 0  # how many times before the client's SDK sent this body and gave up
    user_set: frozenset[str] = frozenset()  # the sampling fields that the client itself gave
    overridden: Json = {}  # those of them that were replaced by force, with the values the client gave


def with_defaults(request: Request, defaults: Sampling) -> Request:
    """The request with `defaults` wherever the client itself gave nothing."""
    given = {name: getattr(request.sampling, name) for name in request.user_set}
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(defaults, **given))


FORCED = ("temperature", "top_p", "top_k", "seed")  # what makes attempts alike, or their logprobs those of a cut


def force_sampling(request: Request, defaults: Sampling) -> Request:
    """The request with `defaults` for everything in FORCED; what the client gave otherwise is kept in `overridden`."""
    given = {name: getattr(request.sampling, name) for name in FORCED if name in request.user_set}
    overridden = {name: value for name, value in given.items() if value != getattr(defaults, name)}
    forced = {name: getattr(defaults, name) for name in FORCED}
    sampling = msgspec.structs.replace(request.sampling, **forced)
    return msgspec.structs.replace(request, sampling=sampling, overridden=overridden)


def text_of(content: str | list[Json] | None) -> str:
    """A message's content as one string: a list of text parts is joined, null is empty."""
    if isinstance(content, list):
        return "".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or ""


# --- the wire ------------------------------------------------------------------------------------------------------

# Bounds without a source in the protocol keep hostile numbers from reaching tensors: ids and counts fit 32 bits.
_INT32 = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # below, logits / temperature leaves float32
_Count = Annotated[int, Meta(ge=1, le=_INT32)]
_TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
_Text = Annotated[str, Meta(min_length=1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]  # looked for in each token's text
_Name = Annotated[str, Meta(max_length=1024)]  # said again in errors

# Accepted and left aside: they identify, bill or cache, or ask of a hosted service what a plain model does anyway.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "reasoning_effort",
        "verbosity",
    }
)
# Accepted only with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
}


# Of chat_template_kwargs: the parameters of transformers' `apply_chat_template`, and what it gives a template itself.
RENDERERS_OWN = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
        *("conversations", "chat_template_kwargs", "template_kwargs", "bos_token", "eos_token", "pad_token"),
        *("unk_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens"),
    }
)
_MAX_VARIABLES = 16 * 1024  # characters of chat_template_kwargs as JSON
_MAX_VARIABLE = 1_000_000  # a number in it; a template may repeat a text as often as it is told


class _Part(msgspec.Struct):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Function(msgspec.Struct):
    name: _Text
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"]


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedTool(msgspec.Struct):
    function: _NamedFunction
    type: Literal["function"]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _PlainFormat(msgspec.Struct, tag="text"):
    pass


class _ObjectFormat(msgspec.Struct, tag="json_object"):
    pass


class _NamedSchema(msgspec.Struct):
    schema: Json
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # held to either way


class _SchemaFormat(msgspec.Struct, tag="json_schema"):
    json_schema: _NamedSchema


class _Wire(msgspec.Struct, kw_only=True):
    """The fields that chat and plain completions share; null means: not given."""

    model: _Name
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None  # vLLM's; 0 and -1: off
    max_tokens: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None  # vLLM's


class _ChatWire(_Wire, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    response_format: _PlainFormat | _ObjectFormat | _SchemaFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: Json | None = None  # vLLM's


class _TextWire(_Wire, kw_only=True):
    prompt: str | list[_TokenId | str | list[_TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


_AnyWire = TypeVar("_AnyWire", bound=_Wire)


_PROMPT_TEXT: Json = {"type": "string", "minLength": 1}
_PROMPT_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _INT32}, "minItems": 1}


def _one_of(schema: Json) -> Json:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}


def body_schemas(models: Sequence[str]) -> dict[str, Json]:
    """JSON Schemas by name: "chat" and "text" are the bodies that `parse_request` takes, the others parts of them.

    What a schema cannot say of two fields together (`top_logprobs` needs `logprobs`) is left to the parser.
    """
    bodies: dict[Kind, type[_Wire]] = {"chat": _ChatWire, "text": _TextWire}
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    named: dict[str, Json] = {name.strip("_"): schema for name, schema in schemas.items()}
    for kind, wire in bodies.items():
        body = named.pop(wire.__name__.strip("_"))
        fields = body["properties"]
        fields |= {name: {"enum": [None, *neutral]} for name, neutral in NEUTRAL.items()}
        fields |= {name: {} for name in HARMLESS}
        fields["model"] = {"type": "string", "enum": list(models)}
        fields["temperature"] = {"anyOf": [{"enum": [0, None]}, {"type": "number", "minimum": 1e-6, "maximum": 100}]}
        if kind == "text":
            fields["prompt"] = {"anyOf": [_PROMPT_TEXT, _PROMPT_IDS, _one_of(_PROMPT_TEXT), _one_of(_PROMPT_IDS)]}
        named[kind] = {**body, "title": kind, "additionalProperties": False}
    text = msgspec.json.encode(named).replace(b"#/components/schemas/_", b"#/components/schemas/")
    decoded: dict[str, Json] = msgspec.json.decode(text)
    return decoded


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse_request(body: bytes, kind: Kind, defaults: Sampling) -> Request:
    """The request that a JSON body asks for; sampling fields the client left out are those of `defaults`.

    Raises ChatError(400) for anything that is not a request this endpoint understands.
    """
    fields = decode_object(body)
    if kind == "chat":
        chat = _convert(fields, _ChatWire)
        _refuse_unknown(fields, _ChatWire)
        return _from_body(_chat_request(fields, chat, defaults), body)
    text = _convert(fields, _TextWire)
    _refuse_unknown(fields, _TextWire)
    return _from_body(_text_request(text, defaults), body)


def _from_body(request: Request, body: bytes) -> Request:
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return msgspec.structs.replace(request, digest=digest)


def _convert(fields: Json, kind: type[_AnyWire]) -> _AnyWire:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`").removeprefix("$").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
            param, message = f"{param}.{missing[1]}".removeprefix("."), "required"
        raise invalid(f"{param}: {message}", param) from None


def _refuse_unknown(fields: Json, kind: type[_Wire]) -> None:
    for name in fields.keys() - set(kind.__struct_fields__) - HARMLESS:
        value = fields[name]
        if name not in NEUTRAL:
            raise invalid(f"unknown parameter: {name[:80]!r}", name[:80], "unknown_parameter")
        if value is not None and (isinstance(value, bool) or value not in NEUTRAL[name]):
            raise invalid(f"{name}: this endpoint does not support it", name, "unsupported_parameter")


def _chat_request(fields: Json, wire: _ChatWire, defaults: Sampling) -> Request:
    if None not in (wire.max_tokens, wire.max_completion_tokens) and wire.max_tokens != wire.max_completion_tokens:
        raise invalid("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    if wire.top_logprobs and not wire.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    sampling = _sampling(wire, wire.max_completion_tokens or wire.max_tokens)
    return Request(
        model=wire.model,
        sampling=msgspec.structs.replace(defaults, **sampling),
        messages=fields["messages"],
        tools=fields.get("tools") or [],
        tool_choice=_tool_choice(fields, wire),
        response_format=None if isinstance(wire.response_format, _PlainFormat) else fields.get("response_format"),
        template_kwargs=_template_kwargs(wire.chat_template_kwargs or {}),
        is_stream=bool(wire.stream),
        wants_usage=_wants_usage(wire),
        wants_logprobs=bool(wire.logprobs),
        top_logprobs=wire.top_logprobs or 0,
        wants_token_ids=bool(wire.return_token_ids),
        user_set=frozenset(sampling),
    )


def _text_request(wire: _TextWire, defaults: Sampling) -> Request:
    prompt = _prompt(wire.prompt)
    if wire.echo and (wire.logprobs is not None or not isinstance(prompt, str)):
        raise invalid("echo goes with a text prompt and without logprobs", "echo")
    sampling = _sampling(wire, wire.max_tokens)
    return Request(
        model=wire.model,
        sampling=msgspec.structs.replace(defaults, **sampling),
        prompt=prompt,
        is_stream=bool(wire.stream),
        wants_usage=_wants_usage(wire),
        wants_logprobs=wire.logprobs is not None,
        top_logprobs=wire.logprobs or 0,
        wants_token_ids=bool(wire.return_token_ids),
        echo=bool(wire.echo),
        user_set=frozenset(sampling),
    )


def _sampling(wire: _Wire, max_tokens: int | None) -> dict[str, Any]:
    """The sampling fields that the client gave, by our names."""
    if wire.temperature is not None and 0 < wire.temperature < _LOWEST_TEMPERATURE:
        raise invalid(f"temperature: 0 (greedy) or at least {_LOWEST_TEMPERATURE}", "temperature")
    given = {
        "temperature": wire.temperature,
        "top_p": wire.top_p,
        "top_k": None if wire.top_k is None else max(wire.top_k, 0),
        "max_tokens": max_tokens,
        "stop": (wire.stop,) if isinstance(wire.stop, str) else None if wire.stop is None else tuple(wire.stop),
        "seed": wire.seed,
        "n": wire.n,
    }
    return {name: value for name, value in given.items() if value is not None}


def _wants_usage(wire: _Wire) -> bool:
    if wire.stream_options is not None and not wire.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    return wire.stream_options is not None and bool(wire.stream_options.include_usage)


def _template_kwargs(variables: Json) -> Json:
    """The variables of the chat template; which of them it reads, the backend knows."""
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
    """The numbers in a JSON value."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


def _tool_choice(fields: Json, wire: _ChatWire) -> str | Json:
    names = {tool.function.name for tool in wire.tools or []}
    if isinstance(wire.tool_choice, _NamedTool):
        if wire.tool_choice.function.name not in names:
            raise invalid(f"tool_choice: no tool is named {wire.tool_choice.function.name!r}", "tool_choice")
        named: Json = fields["tool_choice"]
        return named
    if wire.tool_choice == "required" and not names:
        raise invalid("tool_choice: 'required' needs tools", "tool_choice")
    return wire.tool_choice or "auto"


def _prompt(value: str | list[int | str | list[int]]) -> str | list[int]:
    """The one prompt of a plain completion: text or token ids, alone or in a list of their own."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise invalid("prompt: one prompt per request; send the others as requests of their own", "prompt")
        value = cast("str | list[int | str | list[int]]", value[0])
    if not value:
        raise invalid("prompt: empty", "prompt")
    if isinstance(value, list) and not all(isinstance(token, int) for token in value):
        raise invalid("prompt: text, or a list of token ids", "prompt")
    return cast("str | list[int]", value)
