"""ReplyReader: converts an OpenAI-compatible endpoint's answer, whole or streamed, to choices.

    endpoint writes                                    read as
    null, "" or nothing for id, counts, role, text     absent
    arguments as an object; one call without a list    JSON text; a list with one call
    streamed calls without index, or all with index 0  a call for each new id or second name
    content as parts; the older `function_call`        text; a tool call
    logprobs with a null, or that no token can have    no logprobs: the reply is recorded as text

Ambiguous values are refused with the field's name. Audio and images are not supported.
"""

import json
import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from art_cli.chat.replies import Choice, Echo
from art_cli.chat.requests import Json, Request, needs_echo

_Bytes = list[Annotated[int, Meta(ge=0, le=255)]]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]  # recorded as 32 bits
_Logprob = Annotated[float, Meta(ge=-1e6, le=0.01)]  # rounding may leave a little above 0
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, Meta(ge=0, le=2**53)]


class _TopJson(msgspec.Struct):
    token: str
    logprob: _Logprob
    bytes: _Bytes | None = None


class _TokenJson(_TopJson):
    top_logprobs: list[_TopJson] | None = None


class _LogprobsJson(msgspec.Struct):
    """Chat has `content`; plain completions have the older parallel lists."""

    content: list[_TokenJson] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[_Logprob | None] | None = None
    top_logprobs: list[dict[str, _Logprob] | None] | None = None
    text_offset: list[_Count] | None = None


class ChoiceJson(msgspec.Struct):
    index: int = 0
    message: Json | None = None
    delta: Json | None = None
    text: str | None = None
    logprobs: _LogprobsJson | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's stop string or stop token id
    token_ids: list[_TokenId] | None = None  # vLLM's and art's
    prompt_token_ids: list[_TokenId] | None = None  # vLLM's, in plain completions
    raw_logprobs: list[_Logprob] | None = None  # art's
    sampled_logprobs: list[_Logprob] | None = None  # art's sampled logprobs; `logprobs` are then the raw logprobs


class _UsageJson(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = 0


class ReplyJson(msgspec.Struct):
    id: str | None = None
    created: _Seconds | None = None
    choices: list[ChoiceJson] = []
    usage: _UsageJson | None = None
    prompt_token_ids: list[_TokenId] | None = None  # vLLM's and art's
    step: _Count | None = None  # art's
    error: Any = None

    @property
    def prompt_ids(self) -> list[int] | None:
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        return self.choices[0].prompt_token_ids if self.choices else None

    @property
    def counts(self) -> tuple[int, int] | None:
        return None if self.usage is None else (self.usage.prompt_tokens, self.usage.completion_tokens or 0)


class ReplyReader:
    """Reads one answer, and tracks the tool calls of a stream."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._calls: dict[int, _StreamedCalls] = {}  # choice index -> calls

    def read(self, data: bytes) -> ReplyJson:
        """Raises ValueError, which names what cannot be read."""
        try:
            return msgspec.json.decode(data, type=ReplyJson)
        except msgspec.ValidationError:
            return msgspec.convert(_mended(msgspec.json.decode(data)), ReplyJson, strict=False)

    def choice(self, parsed: ChoiceJson) -> Choice:
        """Returns a choice or a piece of a choice. Raises ValueError with the name of an unreadable field."""
        if not 0 <= parsed.index < self._request.sampling.n:
            raise ValueError(f"a choice of index {parsed.index}, where {self._request.sampling.n} were asked for")
        given = parsed.message if parsed.message is not None else parsed.delta
        message = None if given is None else _message(given)
        if message and "tool_calls" in message:
            if parsed.message is None:
                calls = self._calls.setdefault(parsed.index, _StreamedCalls())
                message["tool_calls"] = [calls.piece(call) for call in message["tool_calls"]]
            else:
                message["tool_calls"] = [_whole(call) for call in message["tool_calls"]]
        if parsed.finish_reason and parsed.index in self._calls:
            self._calls[parsed.index].end()
        choice = Choice(
            index=parsed.index,
            message=message,
            text=parsed.text or (message or {}).get("content") or "",
            token_ids=parsed.token_ids or [],
            raw_logprobs=parsed.raw_logprobs,
            finish_reason={"function_call": "tool_calls"}.get(
                parsed.finish_reason or "", parsed.finish_reason or "stop"
            ),
            stop_string=parsed.stop_reason if isinstance(parsed.stop_reason, str) else None,
        )
        if parsed.logprobs is not None and parsed.logprobs.tokens and needs_echo(self._request):
            _split_echo(self._request, choice, parsed.logprobs)
        elif parsed.logprobs is not None:
            _add_logprobs(choice, parsed.logprobs, wants_top=bool(self._request.top_logprobs))
        if parsed.sampled_logprobs is not None:
            choice.logprobs = parsed.sampled_logprobs
        return choice


# --- odd values -------------------------------------------------------------------------------------------------------


def without_nulls(value: Any) -> Json:
    """Returns an object's non-null fields. Raises ValueError for other types."""
    if not isinstance(value, dict):
        raise ValueError(f"a {_kind(value)} in place of an object")
    return {name: field for name, field in value.items() if field is not None}


def _mended(reply: Any) -> Json:
    """Returns a reply whose fields have OpenAI's types, where their meaning is clear."""
    fields = without_nulls(reply)
    given = fields.get("choices", [])
    choices = [given] if isinstance(given, dict) else given
    if not isinstance(choices, list):
        raise ValueError(f"choices: a {_kind(choices)} in place of a list")
    mended = {
        "id": str(fields["id"]) if isinstance(fields.get("id"), str | int) else None,
        "created": _converted(fields.get("created"), _Seconds),
        "usage": _converted(fields.get("usage"), _UsageJson),
        "choices": [_mended_choice(choice, index) for index, choice in enumerate(choices)],
    }
    return {name: fields[name] for name in ("prompt_token_ids", "step", "error") if name in fields} | mended


def _mended_choice(choice: Any, index: int) -> Json:
    fields = {"index": index} | without_nulls(choice)
    if "logprobs" in fields:
        fields["logprobs"] = _converted(fields["logprobs"], _LogprobsJson)
    return fields


def _converted(value: Any, kind: Any) -> Any:
    """Returns an unimportant value. Values of a wrong type become None."""
    try:
        return msgspec.convert(without_nulls(value) if isinstance(value, dict) else value, kind, strict=False)
    except (ValueError, OverflowError):
        return None


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def _message(given: Json) -> Json:
    """Returns the assistant's message or delta, whose texts are text and whose calls are a list."""
    message = {name: value for name, value in given.items() if name == "content" or value not in (None, [], "", {})}
    if message.get("content") is not None:
        thoughts, message["content"] = _texts(message["content"], "content")
        if thoughts:
            message["reasoning_content"] = thoughts
    for name in ("reasoning_content", "reasoning", "refusal"):
        if name in message:
            message[name] = "".join(_texts(message[name], name))
    message["role"] = "assistant"
    if "function_call" in message:  # OpenAI's form before tools
        message["tool_calls"] = [{"function": message.pop("function_call")}]
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, dict | list):
            raise ValueError(f"tool_calls: a {_kind(calls)} in place of a list")
        message["tool_calls"] = [_call(call) for call in ([calls] if isinstance(calls, dict) else calls)]
    return message


def _texts(value: Any, name: str) -> tuple[str, str]:
    """Returns (thoughts, text) from text or content parts; Mistral sends thoughts as content parts."""
    thoughts, texts = list[str](), list[str]()
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "thinking":
            thoughts += _texts(part.get("thinking") or "", name)
        elif isinstance(part, dict) and isinstance(text := part.get("text", part.get("refusal")), str):
            texts.append(text)
        else:
            what = f"a part of type {str(part.get('type'))[:40]!r}" if isinstance(part, dict) else f"a {_kind(part)}"
            raise ValueError(f"{name}: {what} in place of text")
    return "".join(thoughts), "".join(texts)


# --- tool calls -------------------------------------------------------------------------------------------------------


def _call(given: Any) -> Json:
    """Returns a call or a piece of a call: {"index", "id", "name", "arguments"}, with None for missing values."""
    call = without_nulls(given)
    function = call.get("function", call)
    if not isinstance(function, dict) or ("function" not in call and "name" not in call):
        raise ValueError(f"tool_calls: a call of type {str(call.get('type'))[:40]!r} without a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str | None):
        raise ValueError(f"tool_calls: a name that is a {_kind(name)}")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise ValueError(f"tool_calls: arguments of {(name or '')[:80]!r} that are a {_kind(arguments)}")
    index, id = _converted(call.get("index"), int), call.get("id")
    index = None if index is not None and index < 0 else index
    is_id = isinstance(id, str | int) and not isinstance(id, bool) and id != ""
    return {"index": index, "id": str(id) if is_id else None, "name": name or None, "arguments": arguments or ""}


def _whole(call: Json) -> Json:
    if call["name"] is None:
        raise ValueError("tool_calls: a call without a name")
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"] or new_id(), "type": "function", "function": function}


def new_id() -> str:
    """Returns a new id for a call without an id, because clients answer calls by id."""
    return f"call_{uuid.uuid4().hex[:24]}"


class _StreamedCalls:
    """Assigns the pieces of a stream to a choice's calls.

    OpenAI sends the call's index with each piece, and the id and name with the first piece. Gemini's endpoint sends no
    index, and older Ollama sends index 0 for every call. Therefore a new id or a second name starts a call.
    """

    def __init__(self) -> None:
        self._calls: list[Json] = []
        self._by_index: dict[int, Json] = {}  # endpoint's index -> its newest call
        self._by_id: dict[str, Json] = {}

    def piece(self, piece: Json) -> Json:
        """Returns the piece as an OpenAI delta with the correct index."""
        call = self._find(piece)
        is_new = call is None
        if call is None:
            call = {"index": len(self._calls), "id": piece["id"], "name": None, "arguments": ""}
            self._calls.append(call)
        is_taken = is_new and piece["id"] in self._by_id  # a client could not tell the two calls apart
        if piece["index"] is not None:
            self._by_index[piece["index"]] = call
        if piece["id"] is not None:
            call["id"] = piece["id"]
            self._by_id[piece["id"]] = call
        delta: Json = {"index": call["index"]}
        if is_new:
            delta |= {"id": new_id() if piece["id"] is None or is_taken else piece["id"], "type": "function"}
        function = {"arguments": piece["arguments"]}
        if call["name"] is None and piece["name"] is not None:
            call["name"] = piece["name"]
            function = {"name": piece["name"], **function}
        call["arguments"] += piece["arguments"]
        return {**delta, "function": function}

    def end(self) -> None:
        """Raises ValueError if a call has no name."""
        if any(call["name"] is None for call in self._calls):
            raise ValueError("tool_calls: a call without a name")

    def _find(self, piece: Json) -> Json | None:
        """Returns the call that the piece continues; None starts a new call."""
        index, id = piece["index"], piece["id"]
        newest = self._calls[-1] if self._calls else None
        call = newest if index is None else self._by_index.get(index)
        if id is not None and (index is None or (call is None and self._is_unnumbered(id))):
            call = self._by_id.get(id)
        if call is None or (id is not None and call["id"] not in (None, id)):
            return None
        return None if _is_second(piece, call) else call

    def _is_unnumbered(self, id: str) -> bool:
        """Returns True if no piece of the call with this id had an index so far."""
        return all(call["id"] != id for call in self._by_index.values())


def _is_second(piece: Json, call: Json) -> bool:
    """Returns True if the piece's name begins another call: a new name, or the name behind whole arguments."""
    if piece["name"] is None or call["name"] is None:
        return False
    if piece["name"] != call["name"]:
        return True
    try:
        return isinstance(json.loads(call["arguments"]), dict) and bool(piece["arguments"])
    except (ValueError, RecursionError):
        return False


# --- logprobs ---------------------------------------------------------------------------------------------------------


def _split_echo(request: Request, choice: Choice, parsed: _LogprobsJson) -> None:
    """Removes the prompt from a choice's text and lists, where it precedes the sampled tokens."""
    if request.sampling.max_tokens == 0:
        choice.token_ids = []  # vLLM samples one and does not show it
    tokens, logprobs, tops = parsed.tokens or [], parsed.token_logprobs or [], parsed.top_logprobs or []
    num = len(tokens) - len(choice.token_ids)
    if num > 0:
        offsets = parsed.text_offset or []
        size = offsets[num] - offsets[0] if num < len(offsets) else len(choice.text)
        likeliest = [None if top is None else list(top.items()) for top in tops[:num]]
        choice.echo = Echo(
            text=choice.text[:size],
            tokens=tokens[:num],
            offsets=offsets[:num],
            logprobs=logprobs[:num],
            top_logprobs=likeliest if request.top_logprobs and likeliest else None,
        )
        choice.text = choice.text[size:]
    if choice.token_ids:
        rest = _LogprobsJson(tokens=tokens[num:], token_logprobs=logprobs[num:], top_logprobs=tops[num:] or None)
        _add_logprobs(choice, rest, wants_top=bool(request.top_logprobs))


def _add_logprobs(choice: Choice, parsed: _LogprobsJson, *, wants_top: bool) -> None:
    if parsed.content is not None:
        choice.tokens = [_token(token) for token in parsed.content]
        choice.logprobs = [token.logprob for token in parsed.content]
        if any(token.top_logprobs for token in parsed.content):
            choice.top_logprobs = [
                [(_token(t), t.logprob) for t in token.top_logprobs or []] for token in parsed.content
            ]
    elif parsed.token_logprobs is not None and None not in parsed.token_logprobs:
        choice.tokens = parsed.tokens or []
        choice.logprobs = [logprob for logprob in parsed.token_logprobs if logprob is not None]
        if parsed.top_logprobs is not None and wants_top:
            choice.top_logprobs = [list((top or {}).items()) for top in parsed.top_logprobs]


def _token(parsed: _TopJson) -> str:
    """Returns the token's text. Bytes of an incomplete character become lone surrogates (`replies.token_bytes`)."""
    if parsed.bytes is None or "\ufffd" not in parsed.token:
        return parsed.token
    return bytes(parsed.bytes).decode(errors="surrogateescape")
