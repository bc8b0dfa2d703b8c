"""AnthropicMessages: the wire for Anthropic's Messages API; AnthropicCountTokens: counts a prompt's tokens.

https://docs.claude.com/en/api/messages

Each parameter is supported, harmless to ignore, or refused by name. Headers such as `anthropic-beta` have no effect.
Features that only Anthropic's servers or models have are refused by name: images, documents, tools with another type,
prefilled replies.

Some clients write a billing header into the system prompt, with a new hash for each request. The header is removed,
because otherwise no conversation would continue its own tokens.

    {"role": "user", "content": [tool_result, tool_result, text]}   tool messages, in call order, then a user message
    {"role": "assistant", "content": [thinking, text, tool_use]}    one message, in any block order
    a tool with `defer_loading`                                     omitted from the prompt until a tool_reference
    a tool_result with `is_error`                                   "Error: " before its text, unless it says so itself
    {"role": "system"} after another message                        a user message, because templates refuse it

A reply is a complete message or a stream of events. Thoughts come before text, and text before calls. Thinking blocks
have a signature, because clients drop thoughts without one. The signature is a digest of the thoughts and is never
verified. The `input` of a call is the object from its sampled arguments (`input_of` in replies.py). It is streamed in a
single piece at the end of the call, because truncated arguments are not an object.
"""

import hashlib
import json
import uuid
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers

from art_cli.chat.api_keys import bearer, single
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.replies import Choice, Chunk, PieceQueue, Reply, answer_of, hex_id, input_of, thoughts_of
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.chat.wires.openai_shared import INT32, Count, given_sampling, tool_choice_of

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
BILLING = "x-anthropic-billing-header:"  # begins a line of Claude Code's system prompt
_Name = Annotated[str, Meta(max_length=1024)]  # bounded because errors repeat it
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]  # limited, because every token is checked for it
_SHOWN = 80  # maximum characters of client-provided names in errors
# Parameters accepted and ignored: they identify, bill, cache or diagnose, ask for a place or a speed of the service, or
# let the service shorten a long conversation, which stays whole here.
HARMLESS = frozenset(
    {
        *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "billing_policy"),
        *("fallbacks", "fallback_credit_token", "context_management", "user_profile_id", "workspace_id", "betas"),
    }
)
# Parameters accepted only with neutral values, because Anthropic's servers would do the work.
PROVIDERS = ("container", "mcp_servers", "compaction", "thread")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def message_of(reply: Reply) -> Json:
    choice = reply.choices[0]
    message = choice.message if choice.message is not None else {"content": choice.text}
    return {
        **_head(reply.model, reply.id),
        "content": list(_reply_blocks(message)),
        **_ending(choice),
        "usage": _usage(*reply.num_tokens),
    }


def signature_of(thoughts: str) -> str:
    """Returns a deterministic signature, so a message that is sent back is unchanged."""
    return b64encode(hashlib.blake2b(thoughts.encode(errors="replace"), digest_size=48).digest()).decode()


def _reply_blocks(message: Json) -> Iterator[Json]:
    if thoughts := thoughts_of(message):
        yield {"type": "thinking", "thinking": thoughts, "signature": signature_of(thoughts)}
    if text := answer_of(message):
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        yield {**_tool_use(call), "input": input_of(_function(call).get("arguments") or "")}


def _tool_use(call: Json) -> Json:
    """Returns a call's block without its input. Adds an id if the endpoint sent none."""
    id = call.get("id") or f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": id, "name": _function(call).get("name") or ""}


def _function(call: Json) -> Json:
    """Returns the called function; empty for other types of calls, which some endpoints send."""
    return call.get("function") or {}


def _head(model: str, id: str) -> Json:
    """Returns the message's head. An endpoint's id that is not a UUID is replaced, because it may repeat, and Claude
    Code joins messages with the same id."""
    return {"id": f"msg_{hex_id(id) or uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _ending(choice: Choice) -> Json:
    """Returns the reason of the end, and the stop sequence if one was it."""
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(num_prompt: int, num_sampled: int) -> Json:
    """Reports no cached tokens, so the prompt's tokens are a single number."""
    caches = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt, **caches, "output_tokens": num_sampled}


# --- streamed ---------------------------------------------------------------------------------------------------------


class MessageEvents:
    """The events of a message: message_start, each block's start, deltas and stop, message_delta, message_stop."""

    def __init__(self, wire: "Anthropic") -> None:
        self._wire = wire
        self._last: Chunk | None = None
        self._ended = Choice(index=0)  # final piece of the answer; a chunk with token counts may follow
        self._num_prompt = self._num_sampled = 0
        self._index = -1  # position of the newest block
        self._open = ""  # type of the open block; "" if none
        self._thoughts: list[str] = []
        self._call: Json | None = None  # incomplete call
        self._call_index = -1
        self._queue = PieceQueue()

    def render(self, chunk: Chunk) -> bytes:
        """Returns the events for a chunk, if the client would see its content."""
        is_first, self._last = self._last is None, chunk
        if chunk.is_last:
            self._ended = chunk.choice
        self._num_prompt += len(chunk.prompt_ids or ())
        self._num_sampled += len(chunk.choice.token_ids)
        events = self._start(chunk) if is_first else b""
        delta = {"content": chunk.choice.text} if chunk.choice.message is None else chunk.choice.message
        return events + self._pieces(self._queue.add(delta))

    def finish(self) -> bytes:
        assert self._last is not None, "a stream without chunks"
        events = self._pieces(self._queue.end()) + self._end_call() + self._close()
        counts = self._last.usage or (self._num_prompt, self._num_sampled)
        ending = {"type": "message_delta", "delta": _ending(self._ended), "usage": _usage(*counts)}
        return events + _event(ending) + _event({"type": "message_stop"})

    def fail(self, error: ChatError) -> bytes:
        """Returns the error; no message_stop follows."""
        return b"event: error\ndata: " + self._wire.error(error) + b"\n\n"

    def _start(self, chunk: Chunk) -> bytes:
        message = {**_head(chunk.model, chunk.id), "content": [], "stop_reason": None, "stop_sequence": None}
        counts = chunk.usage or (self._num_prompt, 0)
        return _event({"type": "message_start", "message": {**message, "usage": _usage(*counts)}})

    def _pieces(self, pieces: Iterable[tuple[str | int, Any]]) -> bytes:
        return b"".join(
            self._piece(block, piece) if isinstance(block, str) else self._extend_call(piece, block)
            for block, piece in pieces
        )

    def _piece(self, kind: str, text: str) -> bytes:
        """Returns the text in a block of this type, and opens the block if needed."""
        events = self._end_call()
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events += self._close() + self._begin(empty)
        if kind == "thinking":
            self._thoughts.append(text)
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _extend_call(self, piece: Json, index: int) -> bytes:
        """Returns the events for a piece of a call. The first piece has the name, and later pieces have arguments."""
        events = b""
        if self._call is None or index != self._call_index:
            events = self._end_call()
            self._call, self._call_index = {"id": None, "function": {"name": "", "arguments": ""}}, index
        self._call["id"] = piece.get("id") or self._call["id"]
        for name, value in _function(piece).items():
            if name in ("name", "arguments"):
                self._call["function"][name] += value or ""
        return events

    def _end_call(self) -> bytes:
        """Returns the block of the completed call."""
        if (call := self._call) is None:
            return b""
        self._call = None
        events = self._close() + self._begin({**_tool_use(call), "input": {}})
        given = msgspec.json.encode(input_of(call["function"]["arguments"])).decode()
        return events + self._delta({"type": "input_json_delta", "partial_json": given}) + self._close()

    def _begin(self, block: Json) -> bytes:
        self._index += 1
        self._open = block["type"]
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        """Returns the end of the open block; thoughts end with a signature."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thoughts))})
            self._thoughts = []
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})


def _event(data: Json) -> bytes:
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


# --- the body ---------------------------------------------------------------------------------------------------------


class _Block(msgspec.Struct):
    """A content block of any type. `_Reader` checks that the type is allowed where the block is."""

    type: _Name
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[_Block] | Json | None" = None
    is_error: bool | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: _Name = ""
    type: _Name | None = None
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "none", "tool"]
    name: _Name | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: _Name


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Json


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class MessagesBody(msgspec.Struct, kw_only=True):
    """The JSON body of a request; null means no value."""

    model: _Name
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_tokens: Count | None = None  # required, but not for a count
    system: str | list[_Block] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32)] | None = None
    stop_sequences: Annotated[list[_Stop], Meta(max_length=16)] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None  # the older name of output_config.format


class Anthropic:
    header = "anthropic-version"

    def key(self, headers: Headers) -> str | None:
        """Returns the key of `x-api-key: KEY`, else of `Authorization: Bearer KEY`."""
        return single(headers, "x-api-key").strip() or bearer(headers)

    def error(self, error: ChatError) -> bytes:
        """`{"type": "error", "error": {"type": ..., "message": ...}}`

        Prompts that are too long get Anthropic's wording, which clients recognize.
        """
        status = self.status(error)
        kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def status(self, error: ChatError) -> int:
        """Anthropic uses 529 for an overloaded service."""
        return 529 if error.status == 503 else error.status

    def _request(self, body: MessagesBody, defaults: Sampling, sampling: Json) -> Request:
        tools = [(bool(tool.defer_loading), _tool(index, tool)) for index, tool in enumerate(body.tools or [])]
        reader = _Reader([tool for is_deferred, tool in tools if is_deferred])
        return Request(
            model=body.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            messages=reader.conversation(body),
            failed_calls=frozenset(reader.failed_calls),
            calls_in_parallel=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            tools=[tool for is_deferred, tool in tools if not is_deferred],
            tool_choice=_tool_choice(body),
            response_format=_response_format(body),
            thinks={"enabled": True, "disabled": False}.get(body.thinking.type) if body.thinking else None,
            caps_tokens=True,
            user_set=frozenset(sampling),
        )


class AnthropicMessages(Anthropic):
    path = "/v1/messages"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        parsed = _parse(body)
        if parsed.max_tokens is None:
            raise invalid("max_tokens: required", "max_tokens")
        if parsed.messages[-1].role == "assistant":
            raise invalid("messages: a reply cannot be begun for this model; end with a user message", "messages")
        stop = tuple(parsed.stop_sequences) if parsed.stop_sequences else None
        request = self._request(parsed, defaults, given_sampling(parsed, stop=stop))
        return msgspec.structs.replace(request, is_stream=bool(parsed.stream))

    def render(self, request: Request, reply: Reply) -> bytes:
        return msgspec.json.encode(message_of(reply))

    def stream(self, request: Request) -> MessageEvents:
        return MessageEvents(self)


class AnthropicCountTokens(Anthropic):
    """One token is sampled for the count and dropped, unless the engine can count. The gateway records no count."""

    path = "/v1/messages/count_tokens"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        """Returns the request whose prompt is counted. Raises ChatError 400."""
        request = self._request(_parse(body), defaults, {"max_tokens": 1, "temperature": 0.0, "n": 1})
        return msgspec.structs.replace(request, response_format=None, is_recorded=False, is_count=True)

    def render(self, request: Request, reply: Reply) -> bytes:
        if not reply.is_counted:
            raise ChatError(502, "the endpoint behind reports no token counts", code="upstream_broken")
        return msgspec.json.encode({"input_tokens": reply.num_tokens[0]})

    def stream(self, request: Request) -> MessageEvents:
        return MessageEvents(self)


def _parse(body: bytes) -> MessagesBody:
    fields = decode_object(body)
    parsed = convert(fields, MessagesBody)
    given = {name for name, value in fields.items() if value is not None}
    for name in given - set(MessagesBody.__struct_fields__) - HARMLESS:
        if name not in PROVIDERS:
            raise invalid(f"unknown parameter: {name[:_SHOWN]!r}", name[:_SHOWN], "unknown_parameter")
        if fields[name]:
            raise invalid(f"{name}: only Anthropic's own servers have it", name, "unsupported_parameter")
    return parsed


def _tool(index: int, tool: _Tool) -> Json:
    """Returns the tool in OpenAI's format. Raises ChatError 400 for Anthropic's own tools."""
    if tool.type not in (None, "custom"):
        message = f"the tool {tool.type[:_SHOWN]!r} is Anthropic's own; give a tool with an input_schema"
        raise invalid(f"tools[{index}]: {message}", f"tools[{index}].type")
    if not tool.name or tool.input_schema is None:
        missing = "input_schema" if tool.name else "name"
        raise invalid(f"tools[{index}].{missing}: required", f"tools[{index}].{missing}")
    described = {"description": tool.description} if tool.description is not None else {}
    strict = {"strict": tool.strict} if tool.strict is not None else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema, **strict}}


def _tool_choice(body: MessagesBody) -> str | Json:
    names = {tool.name for tool in body.tools or [] if not tool.defer_loading}
    choice = body.tool_choice or _ToolChoice("auto")
    return tool_choice_of(choice.type, choice.name or "" if choice.type == "tool" else None, names)


def _response_format(body: MessagesBody) -> Json | None:
    wanted = (body.output_config and body.output_config.format) or body.output_format
    if not wanted:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": wanted.schema}}


# --- the messages -----------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, deferred: list[Json]) -> None:
        """`deferred` are tools that are not in the prompt until a result names them."""
        self._deferred = {tool["function"]["name"]: tool for tool in deferred}
        self._messages: list[Json] = []
        self.failed_calls: set[str] = set()  # ids of calls whose result is an error
        self._issued: list[str] = []  # ids of the newest assistant message's calls, in their order

    def conversation(self, body: MessagesBody) -> list[Json]:
        if (system := _without_billing(_texts("system", body.system or ""))) != "":
            self._messages.append({"role": "system", "content": system})
        for index, message in enumerate(body.messages):
            {"user": self._user, "assistant": self._assistant, "system": self._system}[message.role](
                f"messages[{index}].content", message.content
            )
        return self._messages

    def _system(self, place: str, content: str | list[_Block]) -> None:
        role = "user" if self._messages else "system"
        self._messages.append({"role": role, "content": _without_billing(_texts(place, content))})

    def _user(self, place: str, content: str | list[_Block]) -> None:
        """Adds a tool message for each result, in the order in which the calls were issued, then the text."""
        blocks = _blocks(content)
        results = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id or "",
                "content": self._result(f"{place}[{index}]", block),
            }
            for index, block in enumerate(blocks)
            if block.type == "tool_result"
        ]
        order = {id: number for number, id in enumerate(self._issued)}
        self._messages += sorted(results, key=lambda result: order.get(result["tool_call_id"], len(order)))
        texts = [_text(f"{place}[{index}]", block) for index, block in enumerate(blocks) if block.type != "tool_result"]
        if texts or not results:
            self._messages.append({"role": "user", "content": "\n".join(texts)})

    def _assistant(self, place: str, content: str | list[_Block]) -> None:
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(_blocks(content)):
            if block.type == "tool_use":
                calls.append(_call(f"{place}[{index}]", block))
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":  # another model's thoughts, which only its maker can read
                texts.append(_text(f"{place}[{index}]", block))
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        self._issued = [call["id"] for call in calls]
        self._messages.append(message)

    def _result(self, place: str, block: _Block) -> str:
        """Returns a tool result's text. The definition of a discovered tool replaces its name."""
        if block.tool_use_id is None:
            raise invalid(f"{place}.tool_use_id: required", f"{place}.tool_use_id")
        if isinstance(block.content, dict):
            raise invalid(f"{place}.content: text, or a list of blocks", f"{place}.content")
        found = [self._found(inner) for inner in _blocks(block.content or [])]
        text = _texts(f"{place}.content", found)
        if not block.is_error:
            return text
        self.failed_calls.add(block.tool_use_id)
        return text if "error" in text[:_SHOWN].lower() else f"Error: {text}"

    def _found(self, block: _Block) -> _Block:
        """Returns a tool reference as text, and other blocks unchanged."""
        if block.type != "tool_reference":
            return block
        tool = self._deferred.get(block.tool_name or "")
        return _Block("text", json.dumps(tool, ensure_ascii=False) if tool else block.tool_name)


def _blocks(content: str | list[_Block]) -> list[_Block]:
    return [_Block("text", content)] if isinstance(content, str) else content


def _text(place: str, block: _Block) -> str:
    """Returns a block's text. Raises ChatError 400 with the type for other blocks."""
    if block.type != "text":
        message = f"{block.type[:_SHOWN]!r} blocks cannot be read here; send text"
        raise invalid(f"{place}: {message}", place, "unsupported_content")
    if block.text is None:
        raise invalid(f"{place}.text: required", f"{place}.text")
    return block.text


def _texts(place: str, content: str | list[_Block]) -> str:
    return "\n".join(_text(f"{place}[{index}]", block) for index, block in enumerate(_blocks(content)))


def _call(place: str, block: _Block) -> Json:
    """Returns the tool call in OpenAI's form, its arguments written as most models are trained to write them."""
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise invalid(f"{place}.{name}: required", f"{place}.{name}")
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _without_billing(system: str) -> str:
    """Returns the system prompt without lines that begin with BILLING."""
    if BILLING not in system:
        return system
    return "".join(line for line in system.splitlines(keepends=True) if not line.startswith(BILLING))
