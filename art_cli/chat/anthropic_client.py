"""AnthropicBackend: any Anthropic Messages endpoint as a Backend, from Anthropic or another server.

https://docs.claude.com/en/api/messages

It reverses wires/anthropic_messages.py: chat messages become content blocks, and blocks and events become a Reply and
Chunks. The endpoint reports no token ids or logprobs, so replies are text only. Requests that the protocol cannot
express are refused with the parameter's name: plain completions, `response_format`, several choices, logprobs. Thoughts
of earlier replies are not sent back, because the endpoint requires its own signature, which is not stored.
"""

from collections.abc import AsyncGenerator, Iterator, Set
from itertools import takewhile
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.client import HttpBackend, read_answer, read_events
from art_cli.chat.openai_reply import new_id, without_nulls
from art_cli.chat.replies import Choice, Chunk, Reply, input_of
from art_cli.chat.requests import Json, Request, text_of

VERSION = "2023-06-01"  # the protocol's version, sent as the header anthropic-version
FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
# HTTP status for errors inside a stream
STATUSES = {"overloaded_error": 529, "rate_limit_error": 429, "invalid_request_error": 400}


class _UsageJson(msgspec.Struct):
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cache_creation_input_tokens: int | None = 0
    cache_read_input_tokens: int | None = 0

    @property
    def num_prompt(self) -> int:
        return sum(n or 0 for n in (self.input_tokens, self.cache_creation_input_tokens, self.cache_read_input_tokens))


class _BlockJson(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None


class _MessageJson(msgspec.Struct):
    id: str = ""
    content: list[_BlockJson] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _UsageJson | None = None
    input_tokens: int | None = None  # of a count
    error: Any = None


class _DeltaJson(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _EventJson(msgspec.Struct):
    type: str = ""
    index: int | None = None  # None for the newest block
    message: _MessageJson | None = None
    content_block: _BlockJson | None = None
    delta: _DeltaJson | None = None
    usage: _UsageJson | None = None
    error: Any = None


class AnthropicBackend(HttpBackend):
    """Sends requests to `base_url` (`https://api.anthropic.com`). `max_tokens` is the default for calls."""

    def __init__(
        self, base_url: str, api_key: str, model: str, *, max_tokens: int = 8192, timeout_s: float = 300.0
    ) -> None:
        super().__init__(base_url.rstrip("/").removesuffix("/v1"), api_key, model, timeout_s=timeout_s)
        self._max_tokens = max_tokens

    async def reply(self, request: Request) -> Reply:
        async with self._post(request, is_stream=False) as response:
            return self._reply(request, await read_answer(response))

    def _reply(self, request: Request, body: bytes) -> Reply:
        parsed = self._convert(body, _MessageJson)
        if parsed.error:
            raise self._stated_error(parsed.error, body)
        counted = parsed.usage
        if request.is_count:
            counted = None if parsed.input_tokens is None else _UsageJson(input_tokens=parsed.input_tokens)
        with self._unreadable():
            calls = [_call(block) for block in parsed.content if block.type == "tool_use"]
        text = "".join(block.text or "" for block in parsed.content if block.type == "text")
        thoughts = "".join(block.thinking or "" for block in parsed.content if block.type == "thinking")
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        message |= ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
        return Reply(
            id=parsed.id,
            created=0,
            model=request.model,
            choices=[
                Choice(
                    index=0,
                    message=message,
                    text=text,
                    finish_reason=_finish_reason(parsed.stop_reason),
                    stop_string=parsed.stop_sequence,
                )
            ],
            prompt_ids=[],
            step=self.step,
            sampling=request.sampling,
            usage=None if counted is None else (counted.num_prompt, counted.output_tokens or 0),
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Raises ChatError as HttpBackend does, also when the stream ends before the message does."""
        stream = _Stream(request, self.step)
        async with self._post(request, is_stream=True) as response:
            async for data in read_events(response):
                event = self._convert(data, _EventJson)
                if event.type == "error" or event.error:
                    raise self._stated_error(event.error, data)
                if event.type == "message":  # the whole message, from an endpoint that does not stream
                    chunks = [stream.whole(self._reply(request, data))]
                else:
                    with self._unreadable():
                        chunks = list(stream.chunks(event))
                for chunk in chunks:
                    yield chunk
        if not stream.is_over:
            raise self._broken("the stream ended before the answer did")

    def _stated_error(self, error: Any, answer: bytes) -> ChatError:
        """Returns the error in an answer of status 200."""
        kind = error.get("type") if isinstance(error, dict) else None
        return self._refusal(STATUSES.get(str(kind), 502), answer)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _path(self, request: Request) -> str:
        return "v1/messages/count_tokens" if request.is_count else "v1/messages"

    def _headers(self) -> dict[str, str]:
        return {"x-api-key": self._api_key, "anthropic-version": VERSION, "Content-Type": "application/json"}

    def _body(self, request: Request, refused: Set[str], *, is_stream: bool) -> Json:
        _refuse(request)
        sampling, given = request.sampling, request.user_set
        system, messages = _messages(request.messages or [], request.failed_calls)
        body: Json = {"model": self.model, "messages": messages}
        if system:
            body["system"] = system
        if request.tools:
            body |= {"tools": [_tool(tool) for tool in request.tools], "tool_choice": _tool_choice(request)}
        if request.is_count:
            return body
        body |= {"stream": is_stream, "max_tokens": sampling.max_tokens or self._max_tokens}
        if sampling.stop:
            body["stop_sequences"] = list(sampling.stop)
        # Sends only explicit parameters, because newer models refuse temperature together with top_p.
        body |= {name: getattr(sampling, name) for name in ("temperature", "top_p") if name in given}
        if "top_k" in given and sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        return body

    def _refused_by(self, request: Request, refused: Set[str], status: int, answer: bytes) -> frozenset[str]:
        return frozenset()

    def _convert(self, data: bytes, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except (ValueError, RecursionError):
            pass
        try:
            return msgspec.convert(_mended(msgspec.json.decode(data)), kind, strict=False)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"not a message of Anthropic's protocol: {error}") from error


def _mended(value: Any) -> Json:
    """Returns a message, a block or an event whose fields have Anthropic's types, where their meaning is clear."""
    fields = without_nulls(value)
    if isinstance(content := fields.get("content"), str | dict):
        content = [{"type": "text", "text": content} if isinstance(content, str) else content]
    if isinstance(content, list):
        fields["content"] = [_mended(block) for block in content]
    if isinstance(given := fields.get("input"), str):  # arguments in OpenAI's format
        fields["input"] = msgspec.json.decode(given or "{}")
    for name in ("usage", "delta", "message", "content_block"):
        if name in fields:
            fields[name] = _mended(fields[name])
    if not isinstance(fields.get("id", ""), str):
        fields["id"] = str(fields["id"])
    return fields


class _Stream:
    def __init__(self, request: Request, step: int) -> None:
        self._request, self._step = request, step
        self._id = ""
        self._num_prompt = 0
        self._calls: dict[int, int] = {}  # block index -> call index
        self._newest = -1  # index of the newest block
        self.is_over = False

    def chunks(self, event: _EventJson) -> Iterator[Chunk]:
        if event.type == "content_block_start":
            self._newest = self._newest + 1 if event.index is None else event.index
        match event.type:
            case "message_start" if event.message is not None:
                self._id, self._num_prompt = event.message.id, (event.message.usage or _UsageJson()).num_prompt
                yield self._chunk({"role": "assistant"})
            case "content_block_start" if event.content_block is not None and event.content_block.type == "tool_use":
                index = self._calls[self._newest] = len(self._calls)
                whole = _call(event.content_block)
                if not event.content_block.input:  # as Anthropic's own server begins a block: deltas follow
                    whole["function"]["arguments"] = ""
                yield self._chunk({"tool_calls": [{"index": index, **whole}]})
            case "content_block_start" if event.content_block is not None and event.content_block.text:
                yield self._chunk({"content": event.content_block.text})
            case "content_block_delta" if event.delta is not None:
                if delta := self._delta(self._newest if event.index is None else event.index, event.delta):
                    yield self._chunk(delta)
            case "message_delta" if event.delta is not None and not self.is_over:
                self.is_over = True
                usage = event.usage or _UsageJson()
                yield self._chunk(
                    {},
                    finish_reason=_finish_reason(event.delta.stop_reason),
                    stop_string=event.delta.stop_sequence,
                    usage=(usage.num_prompt or self._num_prompt, usage.output_tokens or 0),
                )

    def whole(self, reply: Reply) -> Chunk:
        self.is_over, self._id = True, reply.id
        chunk = self._chunk({}, usage=reply.usage)
        return msgspec.structs.replace(chunk, choice=reply.choices[0], is_last=True)

    def _delta(self, index: int, delta: _DeltaJson) -> Json:
        match delta.type:
            case "text_delta":
                return {"content": delta.text}
            case "thinking_delta":
                return {"reasoning_content": delta.thinking}
            case "input_json_delta" if index in self._calls and delta.partial_json:
                function = {"arguments": delta.partial_json}
                return {"tool_calls": [{"index": self._calls[index], "function": function}]}
        return {}

    def _chunk(
        self,
        delta: Json,
        *,
        finish_reason: str = "",
        stop_string: str | None = None,
        usage: tuple[int, int] | None = None,
    ) -> Chunk:
        return Chunk(
            id=self._id,
            created=0,
            model=self._request.model,
            choice=Choice(
                index=0,
                message=delta,
                text=delta.get("content") or "",
                finish_reason=finish_reason or "stop",
                stop_string=stop_string,
            ),
            is_last=bool(finish_reason),
            step=self._step,
            sampling=self._request.sampling,
            usage=usage,
        )


# --- chat messages as Anthropic's -------------------------------------------------------------------------------------


def _refuse(request: Request) -> None:
    """Raises ChatError 400 for a request that the protocol cannot express."""
    if request.messages is None:
        raise invalid("the upstream endpoint speaks Anthropic's Messages API, which has no plain completions", "prompt")
    asked = {
        "response_format": request.response_format is not None,
        "n": request.sampling.n > 1,
        "logprobs": request.wants_logprobs,
        "chat_template_kwargs": bool(request.template_kwargs),
        "ignore_eos": request.sampling.ignore_eos,
        **dict.fromkeys(request.sampling.reshaping, True),
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise invalid(f"{name}: the upstream endpoint speaks Anthropic's Messages API, which does not support it", name)


def _messages(messages: list[Json], failed_calls: frozenset[str]) -> tuple[str, list[Json]]:
    """Returns the system prompt and the messages as content blocks. Adjacent messages with the same role are merged."""
    leading = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    system = "\n\n".join(filter(None, (text_of(message.get("content")) for message in leading)))
    found: list[Json] = []
    for message in messages[len(leading) :]:
        role = "assistant" if message.get("role") == "assistant" else "user"
        if not (blocks := list(_blocks(message, failed_calls))):
            continue
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        else:
            found.append({"role": role, "content": blocks})
    return system, found


def _blocks(message: Json, failed_calls: frozenset[str]) -> Iterator[Json]:
    text = text_of(message.get("content"))
    if message.get("role") == "tool":
        id = message.get("tool_call_id")
        yield {
            "type": "tool_result",
            "tool_use_id": id,
            "content": text,
            **({"is_error": True} if id in failed_calls else {}),
        }
        return
    if text.strip():  # the endpoint refuses blocks of white space
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments") or ""
        yield {"type": "tool_use", "id": call.get("id"), "name": name, "input": input_of(arguments)}


def _tool(tool: Json) -> Json:
    function = tool["function"]
    described = {"description": function["description"]} if function.get("description") else {}
    return {"name": function["name"], **described, "input_schema": function.get("parameters") or {"type": "object"}}


def _tool_choice(request: Request) -> Json:
    choice = request.tool_choice
    single = {} if request.calls_in_parallel or choice == "none" else {"disable_parallel_tool_use": True}
    if isinstance(choice, str):
        return {"type": {"required": "any"}.get(choice, choice), **single}
    return {"type": "tool", "name": choice["function"]["name"], **single}


def _call(block: _BlockJson) -> Json:
    """Raises ValueError if the call has no name."""
    if not block.name:
        raise ValueError("a tool_use block without a name")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return {"id": block.id or new_id(), "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _finish_reason(stop_reason: str | None) -> str:
    return FINISH_REASONS.get(stop_reason or "", "stop")
