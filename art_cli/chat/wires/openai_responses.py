"""OpenAIResponses: OpenAI's Responses as a wire. The input is a list of items (responses_items.py).

https://platform.openai.com/docs/api-reference/responses

What only a hosted service has is refused by name: its own tools (web search, code interpreter, MCP), images and files,
conversations that it keeps, work in the background.
"""

import uuid
from collections import Counter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires.openai_shared import (
    HARMLESS,
    Count,
    Json,
    Name,
    OpenAI,
    Temperature,
    TopK,
    TopP,
    check_names,
    given_sampling,
    template_kwargs,
)
from art_cli.chat.wires.responses_items import Item, conversation, functions_of, messages_of, name_kinds
from art_cli.chat.wires.responses_reply import ENCRYPTED, ResponseEvents, whole_response

_Text = Annotated[str, Meta(min_length=1)]

_HARMLESS = (HARMLESS - {"reasoning_effort", "verbosity"}) | {
    *("reasoning", "stream_options", "max_tool_calls", "client_metadata", "prompt_cache_options"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
_MAX_REPEATED = 16 * 1024  # characters as JSON; OpenAI's own metadata are 16 pairs of 576 at most
_LOGPROBS = "message.output_text.logprobs"
# Everything else that a client may ask to include belongs to tools and images, which are refused.
_INCLUDABLE = frozenset(
    {
        *(_LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
        *("code_interpreter_call.outputs",),
    }
)
# Fields of the request that a response repeats, with their values where the client gave none.
_REPEATED: tuple[tuple[str, Any], ...] = (
    *(("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("parallel_tool_calls", True)),
    *(
        ("previous_response_id", None),
        ("reasoning", None),
        ("temperature", None),
        ("text", {"format": {"type": "text"}}),
    ),
    *(("tool_choice", "auto"), ("tools", []), ("top_p", None), ("truncation", "disabled"), ("user", None)),
)


class _Tool(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    name: _Text
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Namespace(msgspec.Struct, tag_field="type", tag="namespace", kw_only=True):
    """Functions of the client's that share a prefix, as Codex has them."""

    name: _Text
    tools: list[_Tool]


class _NamedTool(msgspec.Struct):
    name: str
    type: Literal["function"]


class _PlainFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class _ObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class _SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    schema: Json
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # True: exactly; else what a grammar can hold of the schema


class _TextOptions(msgspec.Struct):
    format: _PlainFormat | _ObjectFormat | _SchemaFormat | None = None
    verbosity: str | None = None  # ignored, as on the other wires


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The JSON body of a request for a response; null means that the client gave none."""

    model: Name
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[_Tool | _Namespace] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    text: _TextOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: _Text | None = None
    chat_template_kwargs: Json | None = None  # vLLM's parameter


class OpenAIResponses(OpenAI):
    path = "/v1/responses"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        """Returns the request in a JSON body. Raises ChatError 400."""
        fields = decode_object(body)
        _refuse_by_name(fields)
        asked = convert(fields, ResponsesBody)
        check_names(fields, ResponsesBody, _HARMLESS, _NEUTRAL)
        if asked.background:
            raise _unsupported("background", "this endpoint answers while the client waits")
        sampling, tools = _sampling_of(asked), _chat_tools(fields.get("tools") or [])
        include, previous = _include_of(asked), asked.previous_response_id
        return Request(
            id=uuid.uuid4().hex,
            model=asked.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            messages=conversation(asked.instructions, messages_of(asked.input)),
            tools=tools,
            tool_choice=_tool_choice(asked, tools),
            response_format=_response_format(asked),
            template_kwargs=template_kwargs(asked.chat_template_kwargs or {}),
            is_stream=bool(asked.stream),
            wants_logprobs=_LOGPROBS in include,
            top_logprobs=(asked.top_logprobs or 0) if _LOGPROBS in include else 0,
            user_set=frozenset(sampling),
            instructions=asked.instructions,
            previous=None if previous is None else previous.removeprefix("resp_"),
            is_kept=asked.store is not False,
            repeated=_repeated(fields) | {"include": sorted(include), "store": asked.store is not False},
        )

    def error(self, error: ChatError) -> bytes:
        """Returns OpenAI's error body, which names `input` where the engine named `messages`."""
        body: Json = msgspec.json.decode(super().error(error))
        if error.param == "messages":
            body["error"]["param"] = "input"
        return msgspec.json.encode(body)

    def render(self, request: Request, reply: Reply) -> bytes:
        """Returns the JSON body of a response."""
        return msgspec.json.encode(whole_response(request, reply))

    def stream(self, request: Request) -> ResponseEvents:
        return ResponseEvents(request)


# --- the request ------------------------------------------------------------------------------------------------------


def _unsupported(param: str, message: str) -> ChatError:
    return invalid(f"{param}: {message}", param, "unsupported_parameter")


def _refuse_by_name(fields: Json) -> None:
    """Raises ChatError 400 for tools, items and parts that only a hosted service has."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    for place, tool in enumerate(tools if isinstance(tools, list) else []):
        inner = tool.get("tools") if isinstance(tool, dict) and tool.get("type") == "namespace" else None
        for each in [tool, *(inner if isinstance(inner, list) else [])]:
            kind = each.get("type") if isinstance(each, dict) else None
            if isinstance(kind, str) and kind != "function" and (kind != "namespace" or each is not tool):
                message = f"no provider runs a {kind[:80]!r} tool here; offer tools of type 'function' only"
                raise _unsupported(f"tools[{place}]", message)
    if isinstance(choice, dict) and isinstance(kind := choice.get("type"), str) and kind != "function":
        raise _unsupported(
            "tool_choice", f"{kind[:80]!r} is not supported; 'auto', 'none', 'required' and a function are"
        )
    name_kinds(fields.get("input"))


def _repeated(fields: Json) -> Json:
    """Returns the fields that a response repeats. Fields without another bound are short, because events carry them."""
    for name in ("metadata", "reasoning", "user", "parallel_tool_calls"):
        if len(msgspec.json.encode(fields.get(name))) > _MAX_REPEATED:
            raise invalid(f"{name}: more than {_MAX_REPEATED} characters", name)
    repeated = {name: default if fields.get(name) is None else fields[name] for name, default in _REPEATED}
    return repeated | {"text": {"format": {"type": "text"}, **(fields.get("text") or {})}}


def _sampling_of(asked: ResponsesBody) -> Json:
    """Returns the sampling parameters that the client gave, under the names of `Sampling`."""
    return given_sampling(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, max_tokens=asked.max_output_tokens
    )


def _include_of(asked: ResponsesBody) -> frozenset[str]:
    include = frozenset(asked.include or ())
    if unknown := sorted(include - _INCLUDABLE):
        raise _unsupported("include", f"{unknown[0][:80]!r} is not known here")
    return include


def _chat_tools(tools: list[Json]) -> list[Json]:
    """Returns the tools as chat has them, so that a policy sees the same prompt on both wires. Raises ChatError 400."""
    functions = functions_of(tools)
    name, number = next(iter(Counter(name for name, _ in functions).most_common(1)), ("", 0))
    if number > 1:
        raise invalid(f"tools: {number} functions are named {name[:80]!r}", "tools")
    return [{"type": "function", "function": {"name": name, **_described(tool)}} for name, tool in functions]


def _described(tool: Json) -> Json:
    return {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}


def _tool_choice(asked: ResponsesBody, tools: list[Json]) -> str | Json:
    if isinstance(asked.tool_choice, _NamedTool):
        if asked.tool_choice.name not in {tool["function"]["name"] for tool in tools}:
            raise invalid(f"tool_choice: no tool is named {asked.tool_choice.name!r}", "tool_choice")
        return {"type": "function", "function": {"name": asked.tool_choice.name}}
    if asked.tool_choice == "required" and not tools:
        raise invalid("tool_choice: 'required' needs tools", "tool_choice")
    return asked.tool_choice or "auto"


def _response_format(asked: ResponsesBody) -> Json | None:
    match asked.text.format if asked.text else None:
        case _ObjectFormat():
            return {"type": "json_object"}
        case _SchemaFormat() as format:
            given = {"name": format.name, "description": format.description, "strict": format.strict}
            schema = {name: value for name, value in given.items() if value is not None}
            return {"type": "json_schema", "json_schema": {**schema, "schema": format.schema}}
    return None
