"""AnthropicBackend: chat calls at an endpoint of Anthropic's Messages. The endpoint is art's own wire, or a fake."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat.anthropic_client import AnthropicBackend
from art_cli.chat.chat_app import build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import serve
from art_cli.chat.replies import Reply, ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires.anthropic_messages import AnthropicCountTokens
from tests.support.standins.scripted import ScriptedBackend, tool_call

Json = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
HISTORY: list[Json] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 2, and 3 + 4?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}},
    ]},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "tool", "tool_call_id": "b", "content": "7"},
    {"role": "user", "content": "and their sum?"},
]  # fmt: skip


@asynccontextmanager
async def at(app: Any, **knobs: Any) -> AsyncIterator[AnthropicBackend]:
    async with serve(app) as root:
        backend = AnthropicBackend(root, "sk-1234567", "policy", **knobs)
        try:
            yield backend
        finally:
            await backend.close()


def call(messages: list[Json], **fields: Any) -> Request:
    sampling = Sampling(**fields.pop("sampling", {}))
    return Request(model="policy", messages=messages, sampling=sampling, **fields)


async def ask(backend: AnthropicBackend, request: Request, *, is_stream: bool) -> Reply:
    if not is_stream:
        return await backend.reply(request)
    builder = ReplyBuilder(request)
    async for chunk in backend.stream(request):
        builder.add(chunk)
    return builder.reply()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_with_tools_arrives_as_it_was_sent_and_its_reply_comes_back(is_stream: bool) -> None:
    """The wire is the reference: reading the translated blocks returns the original conversation."""
    asked = ScriptedBackend(lambda request: tool_call("add", a=3, b=7))
    given = frozenset({"temperature", "top_k"})
    request = call(
        HISTORY,
        tools=[TOOL],
        tool_choice="required",
        sampling={"temperature": 0.5, "top_k": 7, "stop": ("END",), "max_tokens": 99},
        user_set=given,
    )
    async with at(build_app(lambda key: asked if key == "sk-1234567" else None)) as backend:
        reply = await ask(backend, request, is_stream=is_stream)
    (seen,) = asked.requests
    assert seen.messages == HISTORY
    assert (seen.tools, seen.tool_choice, seen.sampling.stop) == ([TOOL], "required", ("END",))
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.max_tokens) == (0.5, 7, 99)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message is not None
    (called,) = choice.message["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("add", {"a": 3, "b": 7})
    assert not choice.token_ids and not reply.prompt_ids
    assert reply.usage is not None and reply.usage[0] > 0 < reply.usage[1]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_text_and_the_reason_of_its_end_come_back(is_stream: bool) -> None:
    backend_there = ScriptedBackend(lambda request: "a long answer")
    async with at(build_app(lambda key: backend_there)) as backend:
        cut = await ask(backend, call(HISTORY[:2], sampling={"max_tokens": 4}), is_stream=is_stream)
        whole = await ask(backend, call(HISTORY[:2]), is_stream=is_stream)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("a lo", "length")
    assert (whole.choices[0].message or {})["content"] == "a long answer"
    assert [request.sampling.max_tokens for request in backend_there.requests] == [4, 8192]
    assert "temperature" not in backend_there.requests[0].user_set


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"data: {oops", 502),
        (b'data: {"type": "message_start", "message": {"id": "m"}}\n\n', 502),
        (b'data: {"type": "error", "error": {"type": "overloaded_error", "message": "sk-1234567 is busy"}}\n\n', 529),
    ],
    ids=["garbage", "cut", "error"],
)
async def test_a_stream_that_breaks_is_an_error_without_the_key(body: bytes, status: int) -> None:
    async def answer(http: HttpRequest) -> Response:
        assert http.headers["x-api-key"] == "sk-1234567"
        return Response(body + b"\n\n", media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/messages", answer, methods=["POST"])])
    async with at(app) as backend:
        with pytest.raises(ChatError) as raised:
            await ask(backend, call(HISTORY[:2]), is_stream=True)
    assert raised.value.status == status
    assert "sk-1234567" not in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {}},
        {"sampling": {"n": 2}},
        {"wants_logprobs": True},
        {"sampling": {"logit_bias": ((1, 2.0),)}},
    ],
)
async def test_what_the_protocol_has_no_place_for_is_refused_by_name(fields: Json) -> None:
    backend = AnthropicBackend("http://127.0.0.1:9", "key", "policy")
    with pytest.raises(ChatError, match="Messages"):
        await backend.reply(call(HISTORY[:2], **fields))
    await backend.close()


async def test_failed_calls_and_single_calls_arrive_as_they_were_sent() -> None:
    asked = ScriptedBackend(lambda request: "ok")
    request = call(HISTORY, tools=[TOOL], calls_in_parallel=False, failed_calls=frozenset({"b"}))
    async with at(build_app(lambda key: asked)) as backend:
        await ask(backend, request, is_stream=False)
    (seen,) = asked.requests
    assert (seen.failed_calls, seen.calls_in_parallel) == (frozenset({"b"}), False)


async def test_a_count_is_asked_for_as_a_count_and_samples_nothing() -> None:
    """The wire's request goes to the endpoint's own count, without sampling parameters."""
    asked: list[Json] = []

    async def answer(http: HttpRequest) -> Response:
        asked.append(await http.json())
        return Response(b'{"input_tokens": 37}', media_type="application/json")

    wire = AnthropicCountTokens()
    body = json.dumps({"model": "policy", "messages": HISTORY[1:2], "system": "be brief"}).encode()
    request = wire.parse(body, Sampling())
    async with at(Starlette(routes=[Route("/v1/messages/count_tokens", answer, methods=["POST"])])) as backend:
        reply = await backend.reply(request)
    assert json.loads(wire.render(request, reply)) == {"input_tokens": 37}
    assert asked[0].keys() == {"model", "messages", "system"}
