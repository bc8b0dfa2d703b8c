"""Replies of real servers: null, missing, empty, or mistyped fields, complete and streamed.

The tests know the meaning. Replies with a meaning must be read, and all others must be a 502 that names the field.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from openai.types import chat, responses
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat.anthropic_client import AnthropicBackend
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import HttpBackend, read_events
from art_cli.chat.http_server import serve
from art_cli.chat.replies import Choice, Chunk, Reply, ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import WIRES

Json = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
CALLS = [("get_weather", {"city": "Oslo"}), ("get_time", {"tz": "CET"}), ("get_time", {}), ("get_weather", {"n": [1]})]
TALK = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]}
ASKED: dict[str, Json] = {  # the same question in each protocol of a client
    "/v1/chat/completions": {**TALK, "tools": TOOLS},
    "/v1/messages": {**TALK, "tools": [{"name": tool["function"]["name"], "input_schema": {}} for tool in TOOLS]},
    "/v1/responses": {
        "model": "m",
        "input": "x",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
    },
}


SDK_TYPES: dict[str, tuple[Any, Any]] = {  # of a whole reply, and of an event
    "/v1/chat/completions": (chat.ChatCompletion, chat.ChatCompletionChunk),
    "/v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "/v1/responses": (responses.Response, responses.ResponseStreamEvent),
}


class _Answer:
    """An answer of the endpoint: its body comes in pieces of any size."""

    def __init__(self, body: bytes, size: int = 1000) -> None:
        self.headers: Json = {}
        self._size = size
        self.content = self
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def _canned(kind: type[HttpBackend], body: bytes) -> HttpBackend:
    class Canned(kind):  # type: ignore[misc,valid-type]
        @asynccontextmanager
        async def _post(self, request: Request, *, is_stream: bool) -> AsyncIterator[Any]:
            yield _Answer(body)

    backend: HttpBackend = Canned("http://127.0.0.1:1", "key-of-the-test", "m")
    return backend


async def _ask(kind: type[HttpBackend], body: bytes, *, is_stream: bool) -> Reply:
    """Returns the reply, which every wire can write."""
    backend = _canned(kind, body)
    wires = [WIRES.at(path, Headers({"anthropic-version": "1"})) for path in ASKED]
    asked = [
        wire.parse(json.dumps({**body, "stream": is_stream}).encode(), Sampling())
        for wire, body in zip(wires, ASKED.values(), strict=True)
    ]
    if not is_stream:
        reply = await backend.reply(asked[0])
        for wire, request in zip(wires, asked, strict=True):
            json.loads(wire.render(request, reply))
        return reply
    events = [wire.stream(request) for wire, request in zip(wires, asked, strict=True)]
    builder = ReplyBuilder(asked[0])
    async for chunk in backend.stream(asked[0]):
        builder.add(chunk)
        for each in events:
            each.render(chunk)
    for each in events:
        each.finish()
    return builder.reply()


def _sse(pieces: list[Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(piece).encode() + b"\r\n\r\n" for piece in pieces)


def _meaning(reply: Reply) -> tuple[str, str, list[tuple[str, Any]]]:
    [choice] = reply.choices
    message = choice.message or {}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    ids = [call["id"] for call in message.get("tool_calls") or ()]
    assert all(ids) and len(set(ids)) == len(ids), ids
    thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
    return message.get("content") or "", thoughts, [(c["name"], json.loads(c["arguments"] or "{}")) for c in calls]


def _field(draw: st.DrawFn, name: str, *values: Any) -> Json:
    """Returns {name: one of the values}, or nothing for the value that stands for absent."""
    value = draw(st.sampled_from(values))
    return {} if value is ... else {name: value}


@st.composite
def _heads(draw: st.DrawFn) -> Json:
    return {
        **_field(draw, "id", "chatcmpl-1", None, "", 7, ...),
        **_field(draw, "created", 1700000000, None, "1700000000", 1.7e9, "today", ...),
        **_field(draw, "model", "m", None, "", ...),
        **_field(draw, "object", "chat.completion", None, ...),
    }


@st.composite
def _usages(draw: st.DrawFn) -> Json:
    counts = {
        **_field(draw, "prompt_tokens", 9, None, "9", 9.0, ...),
        **_field(draw, "completion_tokens", 5, None, "5", ...),
        **_field(draw, "prompt_tokens_details", None, {"cached_tokens": None}, ...),
    }
    return _field(draw, "usage", counts, None, [], "none", ...)


def _logprobs(draw: st.DrawFn) -> Json:
    token = {
        "token": "Hi",
        **_field(draw, "logprob", -0.5, None, "-0.5", ...),
        **_field(draw, "bytes", None, [72], [999]),
    }
    return _field(draw, "logprobs", {"content": [token]}, {"content": None}, {}, [], None, ...)


@st.composite
def _talks(draw: st.DrawFn) -> tuple[str, str, list[tuple[str, Json]]]:
    text = draw(st.sampled_from(["", "Hi there", "é\u2028\U0001f600"]))
    thoughts = draw(st.sampled_from(["", "I think"]))
    calls = draw(st.lists(st.sampled_from(CALLS), max_size=3))
    return text, thoughts, calls


@st.composite
def whole_replies(draw: st.DrawFn) -> tuple[Any, bytes]:
    text, thoughts, calls = meaning = draw(_talks())
    parts: list[Any] = [{"type": "text", "text": text}]
    message = {
        **_field(draw, "role", "assistant", None, "", ...),
        "content": draw(st.sampled_from([text, parts, *([None] if not text else [])])),
        **_field(draw, "refusal", None, ...),
        **_field(draw, "annotations", [], None, ...),
        **_field(draw, "audio", None, ...),
    }
    if thoughts:
        message[draw(st.sampled_from(["reasoning_content", "reasoning"]))] = thoughts
    else:
        message |= _field(draw, "reasoning_content", None, "", [], ...)
    written = []
    for place, (name, arguments) in enumerate(calls):
        given = draw(st.sampled_from([json.dumps(arguments), arguments, *([None, ""] if not arguments else [])]))
        call = {
            **_field(draw, "id", f"call_{place}", None, "", 100 + place, ...),
            **_field(draw, "type", "function", None, ...),
            **_field(draw, "index", place, 0, None, ...),
        }
        function = {"name": name, "arguments": given}
        written.append(
            {**call, **(function if draw(st.booleans()) and call.get("type") is None else {"function": function})}
        )
    if len(written) == 1 and draw(st.booleans()):
        message["tool_calls"] = written[0]
    elif written:
        message["tool_calls"] = written
    else:
        message |= _field(draw, "tool_calls", None, [], ...)
    choice = {
        **_field(draw, "index", 0, None, "0", ...),
        "message": message,
        **_field(draw, "finish_reason", "stop", "tool_calls", None, "", ...),
        **_logprobs(draw),
    }
    body = {**draw(_heads()), "choices": [choice], **draw(_usages())}
    return meaning, json.dumps(body).encode()


@st.composite
def streamed_replies(draw: st.DrawFn) -> tuple[Any, bytes]:
    text, thoughts, calls = meaning = draw(_talks())
    way = draw(st.sampled_from(["openai", "no index", "index 0", "one chunk", "repeats id", "repeats name"]))
    deltas: list[Json] = [_field(draw, "role", "assistant", None, ...) | _field(draw, "content", "", None, ...)]
    if thoughts:
        name = draw(st.sampled_from(["reasoning_content", "reasoning"]))
        deltas += [{name: piece, "content": None} for piece in (thoughts[:3], thoughts[3:])]
    deltas += [{"content": piece, "tool_calls": None} for piece in (text[:2], text[2:]) if piece]
    pieces = []
    for place, (name, arguments) in enumerate(calls):
        written = json.dumps(arguments)
        call: Json = {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": ""}}
        if way in ("no index", "one chunk", "index 0"):
            call["function"]["arguments"] = written if draw(st.booleans()) else arguments
            call |= {"index": 0} if way == "index 0" else _field(draw, "index", None, ...)
            pieces.append(call)
            continue
        pieces.append({"index": place, **call})
        for cut in (written[:3], written[3:]):
            piece: Json = {"index": place, "function": {"arguments": cut}}
            if way == "repeats id":
                piece |= {"id": call["id"]}
            elif way == "repeats name":
                piece |= {"id": call["id"], "function": {"name": name, "arguments": cut}}
            else:
                piece |= _field(draw, "id", None, "", ...)
            pieces.append(piece)
    if way == "one chunk" and pieces:
        deltas.append({"tool_calls": pieces})
    else:
        deltas += [{"tool_calls": [piece]} for piece in pieces]
    unfinished = draw(st.sampled_from([{"finish_reason": None}, {"finish_reason": ""}, {}]))
    chunks = []
    for delta in deltas:
        choice = {**_field(draw, "index", 0, None, ...), "delta": delta, **unfinished, **_logprobs(draw)}
        chunks.append({**draw(_heads()), "choices": [choice]})
    ending = draw(st.sampled_from(["finish", "done alone", "usage behind"]))
    if ending != "done alone":
        last = {"index": 0, **_field(draw, "delta", {}, None, ...), "finish_reason": "stop"}
        chunks.append({**draw(_heads()), "choices": [last]})
    if ending == "usage behind":
        chunks.append({**draw(_heads()), **_field(draw, "choices", [], None, ...), **draw(_usages())})
    return meaning, _sse(chunks) + b"data: [DONE]\n\n"


@given(whole_replies())
async def test_an_odd_whole_reply_is_read_as_it_is_meant(drawn: tuple[Any, bytes]) -> None:
    meaning, body = drawn
    assert _meaning(await _ask(HttpBackend, body, is_stream=False)) == tuple(meaning)


@given(streamed_replies())
async def test_an_odd_streamed_reply_is_read_as_it_is_meant(drawn: tuple[Any, bytes]) -> None:
    meaning, body = drawn
    assert _meaning(await _ask(HttpBackend, body, is_stream=True)) == tuple(meaning)


@st.composite
def anthropic_replies(draw: st.DrawFn) -> tuple[Any, bytes, bytes]:
    """Returns (meaning, whole, streamed)."""
    text, thoughts, calls = meaning = draw(_talks())
    blocks: list[Json] = [{"type": "thinking", "thinking": thoughts}] if thoughts else []
    blocks += [{"type": "text", "text": text, **_field(draw, "citations", None, ...)}] if text else []
    for place, (name, arguments) in enumerate(calls):
        given = draw(st.sampled_from([arguments, json.dumps(arguments), *([None] if not arguments else [])]))
        id = _field(draw, "id", f"toolu_{place}", None, 200 + place, ...)
        blocks.append({"type": "tool_use", **id, "name": name, "input": given})
    usage = _field(draw, "usage", {"input_tokens": None, "output_tokens": 5}, {"input_tokens": "9"}, None, ...)
    stop = _field(draw, "stop_reason", "end_turn", None, ...)
    content = text if blocks == [{"type": "text", "text": text}] and draw(st.booleans()) else blocks
    whole = {**_field(draw, "id", "msg_1", None, 7, ...), "type": "message", "content": content, **stop, **usage}
    events: list[Json] = [{"type": "message_start", "message": {**whole, "content": _field(draw, "c", [], None)["c"]}}]
    has_index = draw(st.booleans())
    for place, block in enumerate(blocks):
        at = {"index": place} if has_index else {}
        kind, is_call = block["type"], block["type"] == "tool_use"
        empty = {**block, "input": {}} if is_call else {"type": kind, **_field(draw, kind, "", None, ...)}
        events.append({"type": "content_block_start", **at, "content_block": empty})
        if is_call:
            given = block["input"] if isinstance(block["input"], str) else json.dumps(block["input"] or {})
            deltas = [{"type": "input_json_delta", "partial_json": cut} for cut in (given[:4], given[4:])]
        else:
            deltas = [{"type": f"{kind}_delta", kind: cut} for cut in (block[kind][:2], block[kind][2:])]
        events += [{"type": "content_block_delta", **at, "delta": {**delta, "stop_reason": None}} for delta in deltas]
        events.append({"type": "content_block_stop", **at})
    events.append({"type": "message_delta", "delta": {**stop, "stop_sequence": None}, **usage})
    events.append({"type": "message_stop"})
    return meaning, json.dumps(whole).encode(), _sse(events)


@given(anthropic_replies())
async def test_an_odd_reply_of_anthropics_protocol_is_read_as_it_is_meant(drawn: tuple[Any, bytes, bytes]) -> None:
    meaning, whole, streamed = drawn
    assert _meaning(await _ask(AnthropicBackend, whole, is_stream=False)) == tuple(meaning)
    assert _meaning(await _ask(AnthropicBackend, streamed, is_stream=True)) == tuple(meaning)


ODD = st.sampled_from([None, "", 0, -1, 1.5, True, [], {}, "text", [None], [{}], {"a": None}, 10**30, ["x"]])


@given(st.data())
async def test_any_field_of_any_kind_is_read_or_refused_with_502(data: st.DataObject) -> None:
    """One field, drawn from the whole body, is anything at all. No client sees an internal error for it."""
    is_anthropic, is_stream = data.draw(st.booleans()), data.draw(st.booleans())
    if is_anthropic:
        _, whole, streamed = data.draw(anthropic_replies())
        body = streamed if is_stream else whole
    else:
        _, body = data.draw(streamed_replies() if is_stream else whole_replies())
    pieces = [json.loads(part[6:]) for part in body.split(b"\r\n\r\n") if part.startswith(b"data: {")]
    pieces = pieces if is_stream else [json.loads(body)]
    places = [place for piece in pieces for place in _places(piece)]
    container, key = data.draw(st.sampled_from(places))
    container[key] = data.draw(ODD)
    body = _sse(pieces) + b"data: [DONE]\n\n" * (not is_anthropic) if is_stream else json.dumps(pieces[0]).encode()
    try:
        _meaning(await _ask(AnthropicBackend if is_anthropic else HttpBackend, body, is_stream=is_stream))
    except ChatError as error:
        assert error.status in (429, 502, 529) and error.message
    except json.JSONDecodeError:
        pass  # arguments that the endpoint wrote as text stay that text


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": 7}, "content: a number in place of text"),
        ({"content": [{"type": "image_url"}]}, "content: a part of type 'image_url'"),
        ({"content": None, "tool_calls": [{"type": "custom", "custom": {}}]}, "a call of type 'custom'"),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "arguments of 'f' that are a"),
        ({"content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}, "a call without a name"),
    ],
)
async def test_what_means_nothing_is_a_502_that_names_it(message: Json, named: str) -> None:
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    with pytest.raises(ChatError, match=named) as refused:
        await _ask(HttpBackend, body, is_stream=False)
    assert refused.value.status == 502


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["token_ids", "choice's prompt_token_ids", "prompt_token_ids"])
@pytest.mark.parametrize("id", [-1, 2**32, 10**30])
async def test_a_token_id_that_cannot_be_recorded_is_a_502(name: str, id: int, is_stream: bool) -> None:
    message = {"content": "x"}
    choice: Json = {"index": 0, "message": message, "delta": message, "finish_reason": "stop"}
    body: Json = {"choices": [choice]}
    (body if name == "prompt_token_ids" else choice)[name.removeprefix("choice's ")] = [5, id]
    with pytest.raises(ChatError, match="token_ids") as refused:
        await _ask(HttpBackend, _sse([body]) if is_stream else json.dumps(body).encode(), is_stream=is_stream)
    assert refused.value.status == 502


@pytest.mark.parametrize("logprob", [1.0, -1e30])
async def test_a_logprob_that_no_token_has_leaves_the_text(logprob: float) -> None:
    logprobs = {"content": [{"token": "x", "logprob": logprob}]}
    body = {"created": 1e300, "choices": [{"message": {"content": "x"}, "token_ids": [5], "logprobs": logprobs}]}
    reply = await _ask(HttpBackend, json.dumps(body).encode(), is_stream=False)
    assert (reply.choices[0].text, reply.choices[0].logprobs, reply.created) == ("x", [], 0)


async def test_a_huge_index_of_a_streamed_call_makes_no_list_of_that_length() -> None:
    call = {"index": 10**9, "id": "c", "function": {"name": "get_time", "arguments": "{}"}}
    chunks = [{"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}]
    reply = await _ask(HttpBackend, _sse(chunks) + b"data: [DONE]\n\n", is_stream=True)
    assert _meaning(reply)[2] == [("get_time", {})]


async def _events(path: str, body: bytes) -> list[Json]:
    """Returns the events that a client of this protocol gets."""
    wire = WIRES.at(path, Headers({"anthropic-version": "1"}))
    more = {"stream_options": {"include_usage": True}} if path == "/v1/chat/completions" else {}
    request = wire.parse(json.dumps({**ASKED[path], **more, "stream": True}).encode(), Sampling())
    events = wire.stream(request)
    told = b"".join([events.render(chunk) async for chunk in _canned(HttpBackend, body).stream(request)])
    lines = (told + events.finish()).split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


@settings(max_examples=40)
@given(st.permutations([0, 0, 0, 1, 1, 1, 2, 2, "text"]))
async def test_interleaved_calls_are_whole_calls_in_every_protocol(order: list[Any]) -> None:
    """Three calls and a text arrive in any order of pieces; no arguments are lost or joined to another call."""
    arguments = [['{"n":', "0}"], ['{"n":', "1}"], ["{}"]]
    pieces = [
        iter([{"name": name, "arguments": ""}, *({"arguments": part} for part in parts)])
        for name, parts in zip("abc", arguments, strict=True)
    ]
    deltas: list[Json] = []
    for place in order:
        function = {} if place == "text" else next(pieces[place])
        ids = {"id": f"c{place}"} if "name" in function else {}
        deltas.append(
            {"tool_calls": [{"index": place, **ids, "function": function}]} if function else {"content": "hi"}
        )
    ends = [{"choices": [{"delta": delta}]} for delta in deltas] + [
        {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    ]
    body = _sse(ends) + b"data: [DONE]\n\n"
    wanted = {"a": {"n": 0}, "b": {"n": 1}, "c": {}}
    told = await _events("/v1/messages", body)
    names = {event["index"]: event["content_block"].get("name") for event in told if "content_block" in event}
    inputs = {e["index"]: e["delta"]["partial_json"] for e in told if "partial_json" in e.get("delta", {})}
    assert sorted(str(name) for name in names.values()) == ["None", "a", "b", "c"]
    assert {names[index]: json.loads(written) for index, written in inputs.items()} == wanted
    items = (await _events("/v1/responses", body))[-1]["response"]["output"]
    assert {item["name"]: json.loads(item["arguments"]) for item in items if "name" in item} == wanted
    assert len(items) == 4


WHOLE = {"choices": [{"message": {"content": "Hi"}, "finish_reason": None}]}
QUOTA = {"error": {"message": "quota exceeded", "code": 429}}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (json.dumps(QUOTA).encode(), 429, "quota exceeded"),
        (json.dumps({"error": "out of memory"}).encode(), 502, "out of memory"),
        (json.dumps({"object": "error", "message": "too busy", "code": 503}, indent=1).encode(), 503, "too busy"),
        (b"<html>\n<h1>please log in</h1></html>", 502, "please log in"),
    ],
    ids=["error", "text", "flat", "html"],
)
async def test_an_error_of_status_200_reaches_the_client(body: bytes, status: int, told: str, is_stream: bool) -> None:
    with pytest.raises(ChatError, match=told) as refused:
        await _ask(HttpBackend, body, is_stream=is_stream)
    assert refused.value.status == status


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_an_error_of_status_200_reaches_the_client_of_anthropics_endpoint(is_stream: bool) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "too busy"}}
    with pytest.raises(ChatError, match="too busy") as refused:
        await _ask(AnthropicBackend, json.dumps(error).encode(), is_stream=is_stream)
    assert refused.value.status == 529


async def test_a_whole_reply_to_a_request_for_a_stream_is_the_reply() -> None:
    reply = await _ask(HttpBackend, json.dumps(WHOLE, indent=1).encode(), is_stream=True)
    assert _meaning(reply) == ("Hi", "", [])
    message = {"type": "message", "id": "m", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}
    reply = await _ask(AnthropicBackend, json.dumps(message).encode(), is_stream=True)
    assert _meaning(reply) == ("Hi", "", [])


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"], ids=["LF", "CR", "CRLF"])
@pytest.mark.parametrize("between", [1, 0], ids=["spaced", "dense"])
@pytest.mark.parametrize("indent", [None, 1], ids=["one line", "many lines"])
async def test_events_are_read_at_every_line_end(end: str, between: int, indent: int | None) -> None:
    """An event may have several `data:` lines; some servers put no empty line between events."""
    pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("é", "b")]
    texts = [json.dumps(piece, indent=indent).split("\n") for piece in pieces]
    events = [end.join(f"data: {line}" for line in lines) + end for lines in [*texts, ["[DONE]"]]]
    body = "\ufeff: hi" + end + (end * between).join(events)
    assert _meaning(await _ask(HttpBackend, body.encode(), is_stream=True)) == ("éb", "", [])
    for size in (1, 2, 3):
        answer: Any = _Answer(body.encode(), size)
        *found, done = [event async for event in read_events(answer)]
        assert ([json.loads(event) for event in found], done) == (pieces, b"[DONE]")


@pytest.mark.parametrize("status", [204, 307])
@pytest.mark.parametrize("kind", [HttpBackend, AnthropicBackend])
async def test_a_status_that_is_no_answer_is_named(kind: type[HttpBackend], status: int) -> None:
    async def answer(http: HttpRequest) -> Response:
        return Response(status_code=status)

    assert str(status) in (await _refused(kind, answer)).message


async def test_a_retry_after_that_no_header_can_carry_is_dropped() -> None:
    async def answer(http: HttpRequest) -> Response:
        response = Response(b'{"error": {"message": "slow down"}}', 429)
        response.raw_headers.append((b"retry-after", "€".encode()))
        return response

    refused = await _refused(HttpBackend, answer)
    assert (refused.status, refused.message, refused.retry_after) == (429, "slow down", None)


async def _refused(kind: type[HttpBackend], answer: Any) -> ChatError:
    request = WIRES.at("/v1/chat/completions").parse(json.dumps(TALK).encode(), Sampling())
    async with serve(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as root:
        backend = kind(f"{root}/v1", "key-of-the-test", "m")
        with pytest.raises(ChatError) as refused:
            await backend.reply(request)
        await backend.close()
    return refused.value


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("more", "raw", "is_masked"),
    [
        ({"response_format": {"type": "json_object"}}, None, True),
        ({"tools": TOOLS, "tool_choice": "required"}, None, True),
        ({"presence_penalty": 1.0}, None, True),
        ({"response_format": {"type": "json_object"}}, [-0.7], False),
        ({}, None, False),
    ],
)
async def test_logprobs_after_a_mask_are_marked(more: Json, raw: Any, is_masked: bool, is_stream: bool) -> None:
    """An endpoint such as vLLM reports one logprob per token; art's own also reports the raw one."""
    choice = {"token_ids": [4], "logprobs": {"content": [{"token": "{}", "logprob": 0.0}]}, "finish_reason": "stop"}
    choice |= {"raw_logprobs": raw, "delta" if is_stream else "message": {"content": "{}"}}
    request = WIRES.at("/v1/chat/completions").parse(json.dumps({**TALK, **more}).encode(), Sampling())
    if not is_stream:
        reply = await _canned(HttpBackend, json.dumps({"choices": [choice]}).encode()).reply(request)
    else:
        builder = ReplyBuilder(request)
        async for chunk in _canned(HttpBackend, _sse([{"choices": [choice]}])).stream(request):
            builder.add(chunk)
        reply = builder.reply()
    assert reply.choices[0].is_masked is is_masked


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_stop_string_passes_from_our_own_wires_to_our_own_reader(path: str, is_stream: bool) -> None:
    wire = WIRES.at(path)
    question = {"prompt": "x"} if path == "/v1/completions" else {"messages": TALK["messages"]}
    asked = {"model": "m", **question, "stop": "END", "stream": is_stream, "return_token_ids": True}
    request = wire.parse(json.dumps(asked).encode(), Sampling())
    message = {"content": "a"} if request.messages else None
    choice = Choice(index=0, message=message, text="a", token_ids=[1], logprobs=[-1.0], stop_string="END")
    if not is_stream:
        body = wire.render(request, Reply(id="x", created=1, model="m", choices=[choice], prompt_ids=[1]))
        reply = await _canned(HttpBackend, body).reply(request)
    else:
        events, builder = wire.stream(request), ReplyBuilder(request)
        body = events.render(Chunk(id="x", created=1, model="m", choice=choice, is_last=True)) + events.finish()
        async for chunk in _canned(HttpBackend, body).stream(request):
            builder.add(chunk)
        reply = builder.reply()
    assert reply.choices[0].stop_string == "END"


@pytest.mark.parametrize("path", ASKED)
async def test_an_answer_has_every_field_of_the_sdks_types(path: str) -> None:
    """The SDKs read a reply without checking it; agents of other makers check."""
    calls = [{"id": "c", "function": {"name": "get_time", "arguments": "{}"}}]
    message = {"reasoning_content": "so", "content": "Hi", "tool_calls": calls}
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    piece = {"choices": [{"delta": message, "finish_reason": "tool_calls"}], "usage": usage}
    wire, (whole, event) = WIRES.at(path), SDK_TYPES[path]
    request = wire.parse(json.dumps(ASKED[path]).encode(), Sampling())
    reply = await _canned(HttpBackend, json.dumps(answer).encode()).reply(request)
    TypeAdapter(whole).validate_json(wire.render(request, reply))
    for told in await _events(path, _sse([piece])):
        TypeAdapter(event).validate_python(told)


async def test_a_refusal_is_text_in_every_protocol() -> None:
    message = {"content": None, "refusal": "I cannot"}
    whole = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    streamed = _sse([{"choices": [{"delta": {"refusal": text}}]} for text in ("I ", "cannot")]) + b"data: [DONE]\n\n"
    wires = [WIRES.at(path, Headers({"anthropic-version": "1"})) for path in ASKED]
    for wire, asked in zip(wires, ASKED.values(), strict=True):
        request = wire.parse(json.dumps(asked).encode(), Sampling())
        assert b"I cannot" in wire.render(request, await _canned(HttpBackend, whole).reply(request))
    told = await _events("/v1/messages", streamed)
    assert "".join(event.get("delta", {}).get("text", "") for event in told) == "I cannot"
    assert (await _events("/v1/responses", streamed))[-1]["response"]["output"][0]["content"][0]["text"] == "I cannot"


def test_the_older_function_call_of_a_message_is_refused_by_name() -> None:
    talk = [{"role": "assistant", "content": "x", "function_call": None}, *TALK["messages"]]
    wire = WIRES.at("/v1/chat/completions")
    wire.parse(json.dumps({**TALK, "messages": talk}).encode(), Sampling())
    talk[0]["function_call"] = {"name": "f", "arguments": "{}"}
    with pytest.raises(ChatError, match="function_call"):
        wire.parse(json.dumps({**TALK, "messages": talk}).encode(), Sampling())


async def test_missing_token_counts_are_not_zero() -> None:
    whole = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}).encode()
    streamed = _sse([{"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}])
    reply = await _canned(HttpBackend, whole).reply(
        WIRES.at("/v1/chat/completions").parse(json.dumps(TALK).encode(), Sampling())
    )
    for path in ("/v1/chat/completions", "/v1/responses"):
        wire = WIRES.at(path)
        request = wire.parse(json.dumps(ASKED[path]).encode(), Sampling())
        assert json.loads(wire.render(request, reply))["usage"] is None
        assert not any((event.get("response") or event).get("usage") for event in await _events(path, streamed))
    count = WIRES.at("/v1/messages/count_tokens")
    with pytest.raises(ChatError, match="no token counts"):
        count.render(count.parse(json.dumps(TALK).encode(), Sampling()), reply)
