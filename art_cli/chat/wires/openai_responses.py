"""OpenAIResponses: the wire for OpenAI's Responses API; Memory: replies that clients can reference by id.

https://platform.openai.com/docs/api-reference/responses

The input is a list of items (responses_items.py). Features that need a hosted service are refused by name: built-in
tools (web search, code interpreter, MCP), images and files, stored conversations, background work.

A complete response and a streamed response have the same content: `response.completed` contains the complete answer.
The only difference is text after a streamed call: the texts before and after the call are two messages, and in a
complete answer one message.

Responses are stored unless the client sends `store: false`. Later requests can send its id as `previous_response_id`,
or an item's id as an `item_reference`, instead of the conversation. Stored responses belong to a backend and a key. In
the gateway they belong to a single rollout and are dropped when it ends. They are kept only in memory. The oldest of
the key that has most are dropped first.
"""

import hashlib
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.replies import Choice, Chunk, PieceQueue, Reply, answer_of, thoughts_of
from art_cli.chat.requests import Json, Request, Sampling
from art_cli.chat.wires import openai_shared
from art_cli.chat.wires.responses_items import (
    Item,
    call_item,
    conversation,
    functions_of,
    item_id,
    message_item,
    messages_of,
    name_kinds,
    reasoning_item,
    reasoning_part,
    text_part,
    without_instructions,
)

MAX_REPLIES = 1000
MAX_BYTES = 16 * 2**20  # total size of stored conversations as JSON; 100 turns of 100 KB are 10 MB
ENCRYPTED = "reasoning.encrypted_content"  # value of `include` that requests encrypted content
Event = tuple[str, Json]  # name without "response.", and fields
_Text = Annotated[str, Meta(min_length=1)]
_HARMLESS = (openai_shared.HARMLESS - {"reasoning_effort", "verbosity"}) | {
    *("reasoning", "stream_options", "max_tool_calls", "client_metadata", "prompt_cache_options"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
_MAX_REPEATED = 16 * 1024  # characters as JSON; OpenAI's own metadata has at most 16 pairs of 576
_LOGPROBS = "message.output_text.logprobs"
# All other values of `include` belong to tools and images, which are refused.
_INCLUDABLE = frozenset(
    {
        *(_LOGPROBS, ENCRYPTED, "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
        *("code_interpreter_call.outputs",),
    }
)
# Request fields that a response echoes, with their default values.
_REPEATED: tuple[tuple[str, Any], ...] = (
    *(("instructions", None), ("max_output_tokens", None), ("metadata", {}), ("parallel_tool_calls", True)),
    *(("previous_response_id", None), ("reasoning", None), ("temperature", None), ("text", {})),
    *(("tool_choice", "auto"), ("tools", []), ("top_p", None), ("truncation", "disabled"), ("user", None)),
)


class _Kept(NamedTuple):
    """A conversation up to and including a reply, without the call's instructions."""

    messages: list[Json]
    num_bytes: int


class Memory:
    """The stored conversations of a backend's clients."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()  # digest of the key, id -> conversation
        self._num_bytes = Counter[bytes]()  # by digest of the key

    def recall(self, request: Request, key: str | None) -> Request:
        """Returns the request with its whole conversation. Raises ChatError 400 if the conversation is not stored."""
        messages = request.messages
        if messages is None or (request.previous is None and not any("reply_id" in sent for sent in messages)):
            return request
        ids = [sent["reply_id"] for sent in messages if "reply_id" in sent]
        if len(set(ids)) < len(ids):  # a short body would otherwise become an endless conversation
            raise invalid("input: it refers to one response in two places", "input")
        resolved = [self._find(key, sent["reply_id"])[-1] if "reply_id" in sent else sent for sent in messages]
        before = [] if request.previous is None else self._find(key, request.previous)
        resolved = [*before, *without_instructions(request.instructions, resolved)]
        return msgspec.structs.replace(request, messages=conversation(request.instructions, resolved))

    def keep(self, request: Request, key: str | None, reply: Reply) -> None:
        """Stores the reply to a recalled request. Makes room where most is, so no client drops another's replies."""
        if not request.is_kept or request.messages is None:
            return
        answer = {"role": "assistant", **(reply.choices[0].message or {"content": reply.choices[0].text})}
        messages = [*without_instructions(request.instructions, request.messages), answer]
        kept = _Kept(messages, len(msgspec.json.encode(messages)))
        if kept.num_bytes > MAX_BYTES:
            return
        self._kept[owner := _owner(key), request.id] = kept
        self._num_bytes[owner] += kept.num_bytes
        while self._num_bytes.total() > MAX_BYTES or len(self._kept) > MAX_REPLIES:
            [(largest, _)] = self._num_bytes.most_common(1)
            oldest = next(place for place in self._kept if place[0] == largest)
            self._num_bytes[largest] -= self._kept.pop(oldest).num_bytes
            self._num_bytes += Counter()  # removes keys without replies

    def _find(self, key: str | None, id: str) -> list[Json]:
        if (kept := self._kept.get((_owner(key), id))) is None:
            message = "the response that this request refers to is not, or no longer, kept here; send the conversation"
            raise invalid(f"{message} as input", "previous_response_id", "previous_response_not_found")
        return kept.messages


def _owner(key: str | None) -> bytes:
    return hashlib.blake2b((key or "").encode(errors="surrogateescape"), digest_size=16).digest()


def whole_response(request: Request, reply: Reply) -> Json:
    choice = reply.choices[0]
    counts = reply.num_tokens if reply.is_counted else None
    return _response(request, reply.created, _status(choice.finish_reason), _output(request, choice), counts)


def _response(request: Request, created: int, status: str, output: list[Json], counts: tuple[int, int] | None) -> Json:
    """Returns the current response; `counts` are the tokens of the prompt and answer."""
    repeated = {name: value for name, value in request.repeated.items() if name != "include"}
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": request.model,
        "output": output,
        "usage": None
        if counts is None
        else {
            "input_tokens": counts[0],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(counts),
        },
        **repeated,
    }


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _output(request: Request, choice: Choice) -> list[Json]:
    """Returns an answer's items: thoughts, text, calls. An empty answer has an empty message."""
    message = choice.message or {"content": choice.text}
    thought, text, calls = thoughts_of(message), answer_of(message), message.get("tool_calls") or []
    status = _status(choice.finish_reason)
    logprobs = openai_shared.token_logprobs(request, choice) if request.wants_logprobs else []
    items: list[Json] = []
    if thought:
        id = item_id("rs", request.id, 0)
        items.append(reasoning_item(id, thought, status, is_encrypted=_wants_encrypted(request)))
    if text or not (thought or calls):
        items.append(message_item(item_id("msg", request.id, len(items)), text, status, logprobs))
    for call in calls:
        items.append(call_item(item_id("fc", request.id, len(items)), call, status, _functions(request)))
    return items


def _functions(request: Request) -> Mapping[str, Json]:
    return dict(functions_of(request.repeated["tools"]))


def _wants_encrypted(request: Request) -> bool:
    return ENCRYPTED in request.repeated["include"]


# --- the streamed reply -----------------------------------------------------------------------------------------------


class _OpenItem:
    """A growing item. Subclasses return the item and the events for its start, pieces, and end."""

    prefix: str  # prefix of the id

    def __init__(self, request: Request, place: int) -> None:
        self.request = request
        self.id = item_id(self.prefix, request.id, place)
        self.text = ""


class _OpenThought(_OpenItem):
    prefix = "rs"

    def item(self, status: str) -> Json:
        if status == "in_progress":
            return {**reasoning_item(self.id, "", status, is_encrypted=False), "content": []}
        return reasoning_item(self.id, self.text, status, is_encrypted=_wants_encrypted(self.request))

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": reasoning_part("")})]

    def grow(self, text: str) -> list[Event]:
        self.text += text
        return [("reasoning_text.delta", {"content_index": 0, "delta": text})]

    def end(self) -> list[Event]:
        return [
            ("reasoning_text.done", {"content_index": 0, "text": self.text}),
            ("content_part.done", {"content_index": 0, "part": reasoning_part(self.text)}),
        ]


class _OpenText(_OpenItem):
    prefix = "msg"

    def __init__(self, request: Request, place: int) -> None:
        super().__init__(request, place)
        self.logprobs: list[Any] = []  # one for each token so far
        self.num_told = 0  # number of logprobs that deltas have carried

    def item(self, status: str) -> Json:
        if status == "in_progress":
            return {**message_item(self.id, "", status), "content": []}
        return message_item(self.id, self.text, status, self.logprobs)

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": text_part("")})]

    def grow(self, text: str) -> list[Event]:
        self.text += text
        new, self.num_told = self.logprobs[self.num_told :], len(self.logprobs)
        return [("output_text.delta", {"content_index": 0, "delta": text, "logprobs": new})] if text or new else []

    def end(self) -> list[Event]:
        return [
            *self.grow(""),
            ("output_text.done", {"content_index": 0, "text": self.text, "logprobs": self.logprobs}),
            ("content_part.done", {"content_index": 0, "part": text_part(self.text, self.logprobs)}),
        ]


class _OpenCall(_OpenItem):
    prefix = "fc"

    def __init__(self, request: Request, place: int) -> None:
        super().__init__(request, place)
        self.call_id = self.name = ""  # the name is the full one, as the model calls it
        self._functions = _functions(request)

    def item(self, status: str) -> Json:
        function = {"name": self.name, "arguments": "" if status == "in_progress" else self.text}
        return call_item(self.id, {"id": self.call_id, "function": function}, status, self._functions)

    def begin(self) -> list[Event]:
        return []

    def grow(self, text: str) -> list[Event]:
        self.text += text
        return [("function_call_arguments.delta", {"delta": text})] if text else []

    def end(self) -> list[Event]:
        name = self.item("completed")["name"]
        return [("function_call_arguments.done", {"name": name, "arguments": self.text})]


_Open = _OpenThought | _OpenText | _OpenCall


class ResponseEvents:
    """The events of a streamed response. Only the last item is open; the next item closes it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_events = 0
        self._open: _Open | None = None
        self._items: list[Json] = []  # closed items
        self._call = -1  # index of the open call in the reply
        self._queue = PieceQueue()
        self._logprobs: list[Any] = []  # one for each token that came while no message was open
        self._counts = [0, 0]  # tokens of the prompt and answer
        self._finish_reason = "stop"
        self._last: Chunk | None = None

    def render(self, chunk: Chunk) -> bytes:
        """Returns the events for a chunk, if any content is visible."""
        events = b""
        if self._last is None:
            begun = {"response": _response(self._request, chunk.created, "in_progress", [], None)}
            events = self._event("response.created", begun) + self._event("response.in_progress", begun)
        self._last = chunk
        if chunk.is_last:  # a chunk with counts alone may follow
            self._finish_reason = chunk.choice.finish_reason
        self._counts[0] += len(chunk.prompt_ids or ())
        self._counts[1] += len(chunk.choice.token_ids)
        if self._request.wants_logprobs:
            self._logprobs += openai_shared.token_logprobs(self._request, chunk.choice)
        delta: Json = {"content": chunk.choice.text} if chunk.choice.message is None else chunk.choice.message
        return events + self._pieces(self._queue.add(delta))

    def finish(self) -> bytes:
        """Returns the end of the last item and the response."""
        assert self._last is not None, "a stream without chunks"
        status = _status(self._finish_reason)
        events = self._pieces(self._queue.end())
        if not self._items and self._open is None:
            events += self._grow(_OpenText, "")
        events += self._close(status)
        return events + self._event(f"response.{status}", {"response": self._body(status)})

    def fail(self, error: ChatError) -> bytes:
        """Returns the failed response and an error event, because OpenAI's clients ignore `response.failed`."""
        shown = {"code": error.code or error.type, "message": error.message}
        body = {**self._body("failed"), "error": shown}
        whole = {**shown, "type": error.type, "param": error.param}
        failed = self._event("response.failed", {"response": body})
        return failed + self._event("error", {**shown, "param": error.param, "error": whole})

    def _body(self, status: str) -> Json:
        """Returns the response after its last item is closed."""
        last = self._last
        counts = (self._counts[0], self._counts[1]) if any(self._counts) else None
        counts = counts if last is None or last.usage is None else last.usage
        return _response(self._request, 0 if last is None else last.created, status, self._items, counts)

    def _pieces(self, pieces: Iterable[tuple[str | int, Any]]) -> bytes:
        kinds: dict[str | int, type[_Open]] = {"thinking": _OpenThought, "text": _OpenText}
        return b"".join(
            self._grow(kinds[block], piece) if isinstance(block, str) else self._grow_call(block, piece)
            for block, piece in pieces
        )

    def _grow(self, kind: type[_Open], text: str) -> bytes:
        """Returns the events for a piece of the open item. Opens a new item if the type changed."""
        events = b""
        if not isinstance(self._open, kind):
            events = self._close("completed")
            events += self._start(kind(self._request, len(self._items)))
        assert self._open is not None
        if isinstance(self._open, _OpenText):
            self._open.logprobs += self._logprobs
            self._logprobs.clear()
        return events + self._tell(self._open.grow(text))

    def _grow_call(self, index: int, delta: Json) -> bytes:
        """Returns the events for a piece of a call. The first piece has the name."""
        function = delta.get("function") or {}
        events = b""
        if not isinstance(self._open, _OpenCall) or index != self._call:
            events = self._close("completed")
            call = _OpenCall(self._request, len(self._items))
            call.call_id, call.name = delta.get("id") or call.id, function.get("name") or ""
            self._call = index
            events += self._start(call)
        return events + self._grow(_OpenCall, function.get("arguments") or "")

    def _start(self, item: _Open) -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", {"output_index": len(self._items), "item": item.item("in_progress")}
        )
        return added + self._tell(item.begin())

    def _close(self, status: str) -> bytes:
        if (item := self._open) is None:
            return b""
        if isinstance(item, _OpenText):
            item.logprobs += self._logprobs
            self._logprobs.clear()
        events = self._tell(item.end())
        whole = item.item(status)
        events += self._event("response.output_item.done", {"output_index": len(self._items), "item": whole})
        self._items.append(whole)
        self._open = None
        return events

    def _tell(self, events: Sequence[Event]) -> bytes:
        assert self._open is not None
        common = {"item_id": self._open.id, "output_index": len(self._items)}
        return b"".join(self._event(f"response.{name}", common | fields) for name, fields in events)

    def _event(self, name: str, fields: Json) -> bytes:
        data = msgspec.json.encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class _Tool(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    name: _Text
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class _Namespace(msgspec.Struct, tag_field="type", tag="namespace", kw_only=True):
    """Client functions that share a prefix, as in Codex."""

    name: _Text
    tools: list[_Tool]


class _NamedTool(msgspec.Struct):
    name: str
    type: Literal["function"]


class _SchemaFormat(openai_shared.NamedSchema, tag_field="type", tag="json_schema"):
    """In the Responses API, a schema's fields are the format's own."""


class _TextOptions(msgspec.Struct):
    format: openai_shared.PlainFormat | openai_shared.ObjectFormat | _SchemaFormat | None = None
    verbosity: str | None = None  # ignored, as in the other wires


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The JSON body of a response request; null means no value."""

    model: openai_shared.Name
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[_Tool | _Namespace] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    text: _TextOptions | None = None
    max_output_tokens: openai_shared.Count | None = None
    temperature: openai_shared.Temperature | None = None
    top_p: openai_shared.TopP | None = None
    top_k: openai_shared.TopK | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: _Text | None = None
    chat_template_kwargs: Json | None = None  # vLLM's parameter


class OpenAIResponses(openai_shared.OpenAI):
    path = "/v1/responses"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        fields = decode_object(body)
        _refuse_by_name(fields)
        asked = convert(fields, ResponsesBody)
        openai_shared.check_names(fields, ResponsesBody, _HARMLESS, _NEUTRAL)
        if asked.background:
            raise _unsupported("background", "this endpoint answers while the client waits")
        sampling = openai_shared.given_sampling(asked, max_tokens=asked.max_output_tokens)
        tools = _chat_tools(fields.get("tools") or [])
        include, previous = frozenset(asked.include or ()), asked.previous_response_id
        if unknown := sorted(include - _INCLUDABLE):
            raise _unsupported("include", f"{unknown[0][:80]!r} is not known here")
        return Request(
            id=uuid.uuid4().hex,
            model=asked.model,
            sampling=msgspec.structs.replace(defaults, **sampling),
            messages=conversation(asked.instructions, messages_of(asked.input)),
            tools=tools,
            tool_choice=_tool_choice(asked, tools),
            calls_in_parallel=fields.get("parallel_tool_calls") is not False,
            response_format=_response_format(asked),
            template_kwargs=openai_shared.template_kwargs(asked.chat_template_kwargs or {}),
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
        return msgspec.json.encode(whole_response(request, reply))

    def stream(self, request: Request) -> ResponseEvents:
        return ResponseEvents(request)


# --- the request ------------------------------------------------------------------------------------------------------


def _unsupported(param: str, message: str) -> ChatError:
    return invalid(f"{param}: {message}", param, "unsupported_parameter")


def _refuse_by_name(fields: Json) -> None:
    """Raises ChatError 400 for tools, items, and parts that need a hosted service."""
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
    """Returns the echoed fields. Their size is limited, because events carry them."""
    for name in ("metadata", "reasoning", "user", "parallel_tool_calls"):
        if len(msgspec.json.encode(fields.get(name))) > _MAX_REPEATED:
            raise invalid(f"{name}: more than {_MAX_REPEATED} characters", name)
    repeated = {name: default if fields.get(name) is None else fields[name] for name, default in _REPEATED}
    return repeated | {"text": {"format": {"type": "text"}, **(fields.get("text") or {})}}


def _chat_tools(tools: list[Json]) -> list[Json]:
    """Returns the tools in chat format, so a policy sees the same prompt on both wires. Raises ChatError 400."""
    functions = functions_of(tools)
    name, number = next(iter(Counter(name for name, _ in functions).most_common(1)), ("", 0))
    if number > 1:
        raise invalid(f"tools: {number} functions are named {name[:80]!r}", "tools")
    kept = ("description", "parameters", "strict")
    described = [(name, {key: tool[key] for key in kept if tool.get(key) is not None}) for name, tool in functions]
    return [{"type": "function", "function": {"name": name, **fields}} for name, fields in described]


def _tool_choice(asked: ResponsesBody, tools: list[Json]) -> str | Json:
    names, choice = [tool["function"]["name"] for tool in tools], asked.tool_choice
    if isinstance(choice, _NamedTool):
        return openai_shared.tool_choice_of(None, choice.name, names)
    return openai_shared.tool_choice_of(choice, None, names)


def _response_format(asked: ResponsesBody) -> Json | None:
    match asked.text.format if asked.text else None:
        case openai_shared.ObjectFormat():
            return {"type": "json_object"}
        case _SchemaFormat() as format:
            given = {"name": format.name, "description": format.description, "strict": format.strict}
            schema = {name: value for name, value in given.items() if value is not None}
            return {"type": "json_schema", "json_schema": {**schema, "schema": format.schema}}
    return None
