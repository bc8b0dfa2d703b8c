"""The OpenAI protocol over loopback: real clients, real server, a scripted backend."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import httpx
import msgspec
import openai
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.chat import Backend
from art_cli.chat.chat_app import AppSettings, build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import HttpBackend, openai_body, refused_fields
from art_cli.chat.http_server import Connection, serve
from art_cli.chat.reading import BodyLimit
from art_cli.chat.replies import Chunk, ReplyBuilder
from art_cli.chat.requests import Request, Sampling, with_defaults
from art_cli.chat.wires import OpenAIChat, OpenAICompletions, Wire
from art_cli.chat.wires.openai_chat import ChatBody
from art_cli.chat.wires.openai_completions import CompletionBody
from art_cli.chat.wires.openai_shared import NEUTRAL
from art_cli.runtime.errors import EngineError
from tests.support.standins.scripted import BreakingBackend, ScriptedBackend, encode, logprob, tool_call

KEY = "key-of-the-test"
USER = {"role": "user", "content": "hi"}
WIRE: dict[str, Wire] = {"chat": OpenAIChat(), "text": OpenAICompletions()}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}]


@contextlib.asynccontextmanager
async def serving(backend: Backend, **options: Any) -> AsyncIterator[str]:
    """The base URL of an application that answers KEY from `backend`."""
    app = build_app(lambda key: backend if key == KEY else None, AppSettings(**options))
    async with serve(app) as root:
        yield f"{root}/v1"


@contextlib.asynccontextmanager
async def openai_client(backend: Backend) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(backend) as url,
        openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        yield client


def parse(kind: str = "chat", **fields: Any) -> Request:
    body = {"model": "m", **({"messages": [USER]} if kind == "chat" else {"prompt": "hi"}), **fields}
    return WIRE[kind].parse(json.dumps(body).encode(), Sampling(max_tokens=7))


# --- requests ---------------------------------------------------------------------------------------------------------


def test_what_the_client_gives_wins_over_the_defaults_and_is_remembered() -> None:
    request = parse(temperature=0.5, stop="x", max_completion_tokens=3, top_k=-1)
    assert request.sampling == Sampling(temperature=0.5, stop=("x",), max_tokens=3, top_k=0)
    assert request.user_set == {"temperature", "stop", "max_tokens", "top_k"}
    assert with_defaults(request, Sampling(temperature=0.9, top_p=0.8)).sampling == Sampling(
        temperature=0.5, top_p=0.8, stop=("x",), max_tokens=3, top_k=0
    )
    assert parse().sampling.max_tokens == 7
    assert parse().user_set == frozenset()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-30}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(id): 1 for id in range(1025)}}, "logit_bias"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": True, "stream_options": {"include_usage": True, "bogus": 1}}, "stream_options.bogus"),
        ({"temprature": 1}, "temprature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "poem"}}, "response_format"),
    ],
)
def test_a_parameter_out_of_range_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


def test_parameters_that_change_nothing_are_accepted() -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "reasoning_effort": "low",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "stop": None,
        "tools": None,
        "functions": None,
    }
    assert msgspec.structs.replace(parse(**harmless), user_set=frozenset()) == parse()


def test_all_refused_parameters_are_named_in_one_message_in_one_sequence() -> None:
    """Two unknown parameters and two unsupported parameters, in any order."""
    bad = {"zeta": 1, "min_p": 0.5, "alpha": {}, "best_of": 2}
    for names in (list(bad), list(reversed(bad))):
        with pytest.raises(ChatError) as caught:
            parse(**{name: bad[name] for name in names})
        said = "unknown parameters: 'alpha', 'zeta'; best_of, min_p: this endpoint does not support them"
        assert (caught.value.message, caught.value.param, caught.value.code) == (said, "alpha", "unknown_parameter")


def test_as_many_best_of_as_are_returned_changes_nothing() -> None:
    assert parse("text", best_of=1) == parse("text") and parse("text", best_of=3, n=3) == parse("text", n=3)
    for fields in ({"best_of": 2}, {"best_of": 2, "n": 3}, {"best_of": 1, "n": 2}):
        with pytest.raises(ChatError, match="best_of"):
            parse("text", **fields)


async def test_usage_is_in_each_event_where_the_client_asks_for_it() -> None:
    """vLLM's `continuous_usage_stats`: the prompt's 20 tokens, and those sampled so far; without it, at the end."""
    for wants, running in ((True, [0, 1, 2, 3]), (False, [])):
        async with openai_client(ScriptedBackend(lambda request: "yo")) as client:
            options: Any = {"include_usage": True, "continuous_usage_stats": wants}
            stream = await client.chat.completions.create(
                model="policy", messages=[USER], stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
        told = [chunk.usage.completion_tokens for chunk in chunks[:-1] if chunk.usage]
        assert sorted(set(told)) == running[1:] and {c.usage.prompt_tokens for c in chunks if c.usage} == {20}
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    "prompt",
    ["", [], [1, "a"], ["a", 1], [[1], 2], ["a", ""], [[1], ["a"]], [-1], [2**31], [[]], [[[1]]], ["a"] * 129, 5, None],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_these(prompt: Any) -> None:
    with pytest.raises(ChatError, match="prompt"):
        parse("text", prompt=prompt)
    assert parse("text", prompt=["a"]).prompt == "a"
    assert parse("text", prompt=[[1, 2]]).prompt == [1, 2]
    for hostile in ({"prompt": ["a"] * 5, "n": 128}, {"prompt": [[7] * 9000] * 8, "echo": True, "logprobs": 20}):
        with pytest.raises(ChatError, match="prompt"):
            parse("text", **hostile)
    many = parse("text", prompt=["a", [1, 2], "b"])
    assert [many.prompt, *many.more_prompts] == ["a", [1, 2], "b"]


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"a":"\\ud800"}',
    b'{"temperature":1e999}',
    b'{"seed":' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":' + b"[" * 200 + b"]" * 200 + b"}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: repr(body[:24]))
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_hostile_bodies_are_400(body: bytes, kind: Any) -> None:
    with pytest.raises(ChatError) as caught:
        WIRE[kind].parse(body, Sampling())
    assert caught.value.status == 400
    msgspec.json.decode(WIRE[kind].error(caught.value))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(
    sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *NEUTRAL, "user", "x"})
)


@pytest.mark.slow
@given(st.sampled_from(["chat", "text"]), st.dictionaries(field_names, json_values, max_size=4))
def test_any_json_object_is_a_request_or_a_400(kind: Any, fields: dict[str, Any]) -> None:
    """Property: parsing returns a Request that can be written down, or raises ChatError(400), nothing else."""
    base = {"model": "m", **({"messages": [USER]} if kind == "chat" else {"prompt": "hi"})}
    try:
        request = WIRE[kind].parse(json.dumps({**base, **fields}).encode(), Sampling())
    except ChatError as error:
        assert error.status == 400
        assert json.loads(WIRE[kind].error(error))["error"]["message"]
    else:
        msgspec.json.encode(request)


# --- the openai client ------------------------------------------------------------------------------------------------


async def test_a_plain_reply_has_message_usage_logprobs_and_token_ids() -> None:
    """Prompt `<user>hi\\n<assistant>`: 6 + 2 + 1 + 11 = 20 tokens; the answer `yo` and its stop token: 3."""
    async with openai_client(ScriptedBackend(lambda request: "yo")) as client:
        reply = await client.chat.completions.create(
            model="policy",
            messages=[USER],
            logprobs=True,
            top_logprobs=1,
            extra_body={"return_token_ids": True},
        )
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "yo", "stop")
    assert reply.usage and (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        20,
        3,
        23,
    )
    assert reply.model_extra and reply.model_extra["prompt_token_ids"] == encode("<user>hi\n<assistant>")
    assert choice.model_extra and choice.model_extra["token_ids"] == encode("yo\n")
    assert choice.logprobs and choice.logprobs.content
    assert [token.token for token in choice.logprobs.content] == ["y", "o", "\n"]
    assert [token.logprob for token in choice.logprobs.content] == [2 * logprob(id) for id in encode("yo\n")]
    assert choice.model_extra["sampled_logprobs"] == [logprob(id) for id in encode("yo\n")]
    assert [token.bytes for token in choice.logprobs.content] == [[121], [111], [10]]
    assert choice.logprobs.content[0].top_logprobs[0].token == "y"


async def test_tokens_are_shown_only_to_those_who_ask() -> None:
    async with serving(ScriptedBackend()) as url, httpx.AsyncClient() as client:
        body = {"model": "policy", "messages": [USER]}
        reply = await client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert reply.json() == {
        "id": "reply-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ok"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
    }


async def test_an_impossible_token_has_a_logprob_that_json_can_say() -> None:
    class Impossible(ScriptedBackend):
        async def reply(self, request: Request) -> Any:
            reply = await super().reply(request)
            reply.choices[0].raw_logprobs[0] = float("-inf")
            return reply

    async with openai_client(Impossible()) as client:
        reply = await client.chat.completions.create(model="policy", messages=[USER], logprobs=True)
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert reply.choices[0].logprobs.content[0].logprob == -9999.0


async def test_a_stream_begins_with_the_role_and_ends_with_usage() -> None:
    async with openai_client(ScriptedBackend(lambda request: "yo")) as client:
        stream = await client.chat.completions.create(
            model="policy",
            messages=[USER],
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == ["y", "o"]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None, None, None]
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == 23
    sampled = [
        token.token for c in chunks[:-1] if c.choices[0].logprobs for token in c.choices[0].logprobs.content or ()
    ]
    assert sampled == ["y", "o", "\n"]


async def test_the_clients_own_stream_helper_rebuilds_tool_calls() -> None:
    """openai's `chat.completions.stream` puts deltas together by their index; n = 2 interleaves two choices."""
    backend = ScriptedBackend(lambda request: tool_call("add", a=1, b=2))
    async with (
        openai_client(backend) as client,
        client.chat.completions.stream(model="policy", messages=[USER], tools=TOOLS, n=2) as stream,
    ):
        final = await stream.get_final_completion()
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert (call.id, call.function.name, json.loads(call.function.arguments)) == (
            "call-add",
            "add",
            {"a": 1, "b": 2},
        )
    assert backend.requests[0].tools == TOOLS


async def test_the_sync_client_works_from_a_thread() -> None:
    def ask(url: str) -> tuple[str | None, list[str]]:
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            message = client.chat.completions.create(model="policy", messages=[USER]).choices[0].message
            return message.content, [model.id for model in client.models.list()]

    async with serving(ScriptedBackend(lambda request: "yo")) as url:
        assert await asyncio.to_thread(ask, url) == ("yo", ["policy"])


async def test_plain_completions_echo_and_count_logprobs() -> None:
    async with openai_client(ScriptedBackend(lambda request: "yo")) as client:
        echoed = await client.completions.create(model="policy", prompt="say ", echo=True)
        reply = await client.completions.create(model="policy", prompt=encode("say "), logprobs=1)
        stream = await client.completions.create(model="policy", prompt="say ", echo=True, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert echoed.choices[0].text == text == "say yo"
    assert reply.choices[0].text == "yo"
    assert reply.choices[0].logprobs
    assert reply.choices[0].logprobs.tokens == ["y", "o", "\n"]
    assert reply.choices[0].logprobs.text_offset == [0, 1, 2]
    assert reply.choices[0].logprobs.token_logprobs == [2 * logprob(id) for id in encode("yo\n")]


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_errors_are_the_clients_own_exception_types() -> None:
    def answer(request: Request) -> str:
        raise ChatError(400, "the prompt is too long", param="messages", code="context_length_exceeded")

    async with openai_client(ScriptedBackend(answer)) as client:
        with pytest.raises(openai.BadRequestError, match="too long") as caught:
            await client.chat.completions.create(model="policy", messages=[USER])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError, match="too long"):  # before the first chunk: no stream at all
            await client.chat.completions.create(model="policy", messages=[USER], stream=True)
        with pytest.raises(openai.NotFoundError, match="there is 'policy'"):
            await client.chat.completions.create(model="other", messages=[USER])
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.with_options(api_key="wrong-key").models.list()
        assert "wrong-key" not in str(refused.value)


async def test_a_defect_of_the_backend_is_a_500_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: Request) -> str:
        raise RuntimeError("secret detail")

    async with openai_client(ScriptedBackend(answer)) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="policy", messages=[USER])
    assert "secret detail" not in str(caught.value)
    assert "secret detail" in caplog.text


async def test_a_failure_in_the_middle_of_a_stream_reaches_the_client() -> None:
    async with openai_client(BreakingBackend(lambda request: "yo")) as client:
        stream = await client.chat.completions.create(model="policy", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/health/", 404),
    ],
)
async def test_unknown_routes_get_an_openai_error(method: str, path: str, status: int) -> None:
    async with serving(ScriptedBackend()) as url, httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = await client.request(method, url.removesuffix("/v1") + path, headers=headers)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1/chat/completions/", "/v1//chat/completions", "/v1/v1/models"]
)
async def test_another_base_url_is_told_the_address(path: str) -> None:
    async with serving(ScriptedBackend()) as url, httpx.AsyncClient() as client:
        reply = await client.post(url.removesuffix("/v1") + path, headers={"Authorization": f"Bearer {KEY}"})
    known = "/v1/models" if "models" in path else "/v1/chat/completions"
    assert reply.status_code == 404 and f"the address is {known}:" in reply.json()["error"]["message"]


async def test_a_client_that_offers_http2_is_answered_and_a_compressed_body_is_refused_by_name() -> None:
    """As Java's HTTP client offers it with its first request; the connection lives on."""
    body = json.dumps({"model": "policy", "messages": [{**USER, "content": "\r\nUpgrade: h2c\r\n\r\n"}]}).encode()
    headers = {"Authorization": f"Bearer {KEY}"}
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQ"}
    backend = ScriptedBackend(lambda request: str(request.messages))
    async with serving(backend) as url, httpx.AsyncClient(headers=headers) as client:
        for more in (offer, {}, offer):
            reply = await client.post(f"{url}/chat/completions", content=body, headers=more)
            assert "Upgrade: h2c" in reply.json()["choices"][0]["message"]["content"]
        packed = gzip.compress(body)
        reply = await client.post(f"{url}/chat/completions", content=packed, headers={"Content-Encoding": "gzip"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "'gzip'" in reply.json()["error"]["message"]


async def test_a_body_over_the_limit_is_a_413_and_the_connection_lives_on() -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        serving(ScriptedBackend(), body_limit=lambda: BodyLimit(1000)) as url,
        httpx.AsyncClient(headers=headers) as client,
    ):
        reply = await client.post(f"{url}/chat/completions", content=b"x" * 5000)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.get(f"{url}/models")).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(is_stream: bool) -> None:
    started = asyncio.Event()

    async def answer(request: Request) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    backend = ScriptedBackend(answer)
    async with openai_client(backend) as client:
        call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[USER], stream=is_stream))
        await asyncio.wait_for(started.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(backend.was_cancelled.wait(), 10)
    assert [request.is_stream for request in backend.requests] == [is_stream]


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it() -> None:
    closed, num_yielded = asyncio.Event(), 0

    class Endless(ScriptedBackend):
        async def stream(self, request: Request) -> AsyncIterator[Any]:
            chunks = [chunk async for chunk in super().stream(request)]
            try:
                while True:
                    nonlocal num_yielded
                    num_yielded += 1
                    yield chunks[0]
                    await asyncio.sleep(0)
            finally:
                closed.set()

    async with openai_client(Endless(lambda request: "yo")) as client:
        stream = await client.chat.completions.create(model="policy", messages=[USER], stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(closed.wait(), 10)
        num_before = num_yielded
        await asyncio.sleep(0.1)
        assert num_yielded == num_before


@pytest.mark.slow
async def test_streams_that_are_there_at_once_hold_nobody_up() -> None:
    """Eight streams of 2,000 chunks that wait for nothing: a request that comes later is answered before they end."""

    class Fast(ScriptedBackend):
        num_yielded = 0

        async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
            first = await anext(aiter(super().stream(request)))
            for _ in range(2000):
                self.num_yielded += 1
                yield msgspec.structs.replace(first, is_last=False)
            yield msgspec.structs.replace(first, is_last=True)

    backend = Fast()
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "policy", "messages": [USER]}
    async with serving(backend) as url, httpx.AsyncClient(headers=headers, timeout=60) as client:
        path = f"{url}/chat/completions"
        streams = [asyncio.create_task(client.post(path, json={**body, "stream": True})) for _ in range(8)]
        while backend.num_yielded < 8:
            await asyncio.sleep(0)
        assert (await client.post(path, json=body)).status_code == 200
        assert backend.num_yielded < 8 * 1000
        assert {(await stream).status_code for stream in streams} == {200}


def test_replies_leave_at_once_in_every_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each accepted connection has TCP_NODELAY; asyncio sets it only where the listener names its protocol."""
    seen = []
    made = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    async def ask() -> None:
        async with serve(build_app(lambda key: None)) as root, aiohttp.ClientSession(root) as session:
            assert (await session.get("/health")).status == 200

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    for make in (asyncio.SelectorEventLoop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(ask())
    assert len(seen) == 2 and all(seen)


async def test_a_port_in_use_is_one_line_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match="the port is in use; choose another") as caught:
            async with serve(build_app(lambda key: None), port=taken.getsockname()[1]):
                pass
    assert "\n" not in str(caught.value)


# --- streams put together ---------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.text(max_size=8) | st.just(tool_call("add", a=1)), st.integers(1, 3), st.none() | st.integers(1, 4))
async def test_the_chunks_of_a_stream_put_together_are_the_reply(answer: Any, n: int, max_tokens: int | None) -> None:
    """Property: for any answer, number of choices and cut, ReplyBuilder over `stream` gives what `reply` gives."""
    backend = ScriptedBackend(lambda request: answer)
    request = Request(
        model="policy",
        messages=[USER],
        sampling=Sampling(n=n, max_tokens=max_tokens),
        wants_logprobs=True,
        top_logprobs=1,
    )
    builder = ReplyBuilder(request)
    async for chunk in backend.stream(request):
        assert not builder.is_complete
        builder.add(chunk)
    assert builder.is_complete
    assert builder.reply() == await backend.reply(request)


# --- HttpBackend ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def http_backend(url: str, key: str = KEY, **options: Any) -> AsyncIterator[HttpBackend]:
    backend = HttpBackend(url, key, "policy", **options)
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize("answer", ["yo", tool_call("add", a=1)], ids=["text", "tool call"])
@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_a_request_through_arts_own_server_loses_nothing(answer: Any, kind: str) -> None:
    """Every field of the reply, tokens, logprobs under both distributions and step included, plain and streamed."""
    scripted = ScriptedBackend(lambda request: answer)
    question: dict[str, Any] = {"messages": [USER]} if kind == "chat" else {"prompt": "hi"}
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=5, max_tokens=200, stop=("#",), seed=4, n=2,
                        presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5,
                        logit_bias=((5, 2.0), (7, -100.0)), min_tokens=2, ignore_eos=True)  # fmt: skip
    request = Request(model="policy", sampling=sampling, wants_logprobs=True, top_logprobs=1, **question)
    async with serving(scripted) as url, http_backend(url) as backend:
        reply = await backend.reply(request)
        builder = ReplyBuilder(request)
        async for chunk in backend.stream(msgspec.structs.replace(request, is_stream=True)):
            builder.add(chunk)
    expected = await scripted.reply(request)
    for choice in expected.choices if kind == "chat" else ():
        choice.text = choice.message["content"] or ""  # what a tool call was sampled as is not in an OpenAI reply
    expected.usage = (len(expected.prompt_ids), sum(len(choice.token_ids) for choice in expected.choices))
    assert reply == expected
    assert builder.reply() == expected
    assert scripted.requests[0].sampling == sampling


async def test_it_says_its_sampling_outright() -> None:
    """vLLM would otherwise take temperature, top_p and top_k from the model's generation_config.json."""
    scripted = ScriptedBackend()
    async with serving(scripted) as url, http_backend(url) as backend:
        await backend.reply(Request(model="policy", messages=[USER], sampling=Sampling()))
    assert {"temperature", "top_p", "top_k", "n"} <= scripted.requests[0].user_set


class Foreign:
    """An ASGI endpoint that refuses fields as hosted models do, and knows no token ids."""

    def __init__(self, *, refuses: tuple[str, ...]) -> None:
        self.refuses = refuses
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        refused = next((name for name in self.refuses if name in body), None)
        if refused is None:
            message = {"role": "assistant", "content": "yo", "refusal": None, "annotations": []}
            answer: Any = {
                "id": "x",
                "created": 1.0,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 4, "completion_tokens": 2},
            }
        else:
            answer = {"error": {"message": f"Unsupported parameter: '{refused}' is not supported with this model."}}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200 if refused is None else 400, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def test_a_field_that_an_endpoint_refuses_and_the_client_did_not_ask_for_is_left_out() -> None:
    foreign = Foreign(refuses=("return_token_ids", "top_k", "max_tokens", "seed", "logprobs"))
    request = Request(model="policy", messages=[USER], sampling=Sampling(max_tokens=9, seed=1))
    async with serve(foreign) as root, http_backend(f"{root}/v1") as backend:
        first = await backend.reply(request)
        num_tries = len(foreign.bodies)
        await backend.reply(request)
    assert first.choices[0].message == {"role": "assistant", "content": "yo"}
    assert (first.prompt_ids, first.choices[0].token_ids, first.usage) == ([], [], (4, 2))
    assert len(foreign.bodies) == num_tries + 1  # learnt once
    assert foreign.bodies[-1]["max_completion_tokens"] == 9
    assert not set(foreign.refuses) & set(foreign.bodies[-1])


async def test_a_refusal_changes_later_requests_only_if_the_request_without_the_field_succeeds() -> None:
    """A client may write text that reads like a refusal; it must not change the sampling of other clients."""
    foreign = Foreign(refuses=("top_k", "temperature"))
    cold = Request(model="policy", messages=[USER], sampling=Sampling(temperature=0.5))
    async with serve(foreign) as root, http_backend(f"{root}/v1") as backend:
        with pytest.raises(ChatError, match="'temperature' is not supported"):
            await backend.reply(cold)
        foreign.refuses = ()
        await backend.reply(cold)
    assert ["top_k" in body for body in foreign.bodies] == [True, False, True]


async def test_a_wish_to_think_is_left_out_where_an_endpoint_knows_no_templates() -> None:
    """Variables that the client names itself are not left out."""
    foreign = Foreign(refuses=("chat_template_kwargs",))
    request = Request(model="policy", messages=[USER], sampling=Sampling(), thinks=False)
    named = Request(model="policy", messages=[USER], sampling=Sampling(), template_kwargs={"enable_thinking": False})
    async with serve(foreign) as root, http_backend(f"{root}/v1") as backend:
        await backend.reply(request)
        with pytest.raises(ChatError, match="'chat_template_kwargs' is not supported"):
            await backend.reply(named)
    assert foreign.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in foreign.bodies[1]


@pytest.mark.parametrize(
    ("message", "param", "is_refused"),
    [
        ("Unsupported parameter: 'top_k' is not supported with this model.", "top_k", True),
        ("Unrecognized request arguments supplied: return_token_ids, top_k", None, True),
        (
            "[{'type': 'extra_forbidden', 'loc': ['body', 'top_k'], 'msg': 'Extra inputs are not permitted'}]",
            None,
            True,
        ),
        ("'top_k' : property 'top_k' is unsupported", None, True),
        ('Unknown name "top_k": Cannot find field.', None, True),
        ("top_k: Extra inputs are not permitted", None, True),
        (
            "Invalid schema for function 'f': context=('properties', 'top_k'), 'x' is not permitted.",
            "tools[0]",
            False,
        ),
        ("Invalid schema for function 'f': context=('properties', 'top_k'), 'x' is not permitted.", None, False),
        ("[{'loc': ['body', 'tools', 0, 'top_k'], 'msg': 'Extra inputs are not permitted'}]", None, False),
        ("Unsupported value: 'metadata.top_k' is not supported", "metadata.top_k", False),
        ("I do not support the top_k students of an unknown school", None, False),
    ],
)
def test_a_field_is_refused_only_where_the_error_names_it(message: str, param: str | None, is_refused: bool) -> None:
    """A client chooses the names in its tools, and no such name may change the sampling of other clients."""
    request = Request(model="policy", messages=[USER], sampling=Sampling())
    answer = json.dumps({"error": {"message": message, "param": param}}).encode()
    refused = refused_fields(request, frozenset(), 400, answer)
    assert bool(refused) is is_refused
    assert ("top_k" in openai_body(request, "policy", refused, is_stream=False)) is not is_refused


def test_a_wish_to_think_is_left_out_where_the_template_does_not_read_it() -> None:
    message = "chat_template_kwargs.enable_thinking: this model's chat template does not read it"
    answer = json.dumps({"error": {"message": message, "param": "chat_template_kwargs.enable_thinking"}}).encode()
    wish = Request(model="policy", messages=[USER], sampling=Sampling(), thinks=True)
    named = msgspec.structs.replace(wish, template_kwargs={"enable_thinking": True})
    named_fields = [refused_fields(request, frozenset(), 400, answer) for request in (wish, named)]
    assert named_fields == [{"chat_template_kwargs"}, set()]


async def test_what_the_client_asked_for_is_never_left_out() -> None:
    foreign = Foreign(refuses=("temperature",))
    request = Request(model="policy", messages=[USER], sampling=Sampling(temperature=0.5))
    async with serve(foreign) as root, http_backend(f"{root}/v1") as backend:
        with pytest.raises(ChatError, match="'temperature' is not supported") as caught:
            await backend.reply(request)
    assert caught.value.status == 400


async def test_an_endpoint_that_is_not_there_is_a_502_without_the_key() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://user:{KEY}@127.0.0.1:{closed.getsockname()[1]}/v1"
        async with http_backend(url) as backend:
            with pytest.raises(ChatError) as caught:
                await backend.reply(Request(model="policy", messages=[USER], sampling=Sampling()))
    assert caught.value.status == 502
    assert KEY not in caught.value.message


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_endpoint_that_does_not_answer_is_a_504(is_stream: bool) -> None:
    async def answer(request: Request) -> str:
        await asyncio.Event().wait()
        return "never"

    request = Request(model="policy", messages=[USER], sampling=Sampling(), is_stream=is_stream)
    async with serving(ScriptedBackend(answer)) as url, http_backend(url, timeout_s=0.1) as backend:
        with pytest.raises(ChatError) as caught:
            if is_stream:
                await anext(aiter(backend.stream(request)))
            else:
                await backend.reply(request)
    assert caught.value.status == 504


async def test_a_refused_key_is_told_without_what_the_endpoint_says_of_it() -> None:
    async with serving(ScriptedBackend()) as url, http_backend(url, key="sk-wrong") as backend:
        with pytest.raises(ChatError, match="refused our API key") as caught:
            await backend.reply(Request(model="policy", messages=[USER], sampling=Sampling()))
    assert caught.value.status == 401


async def test_a_stream_that_breaks_off_is_an_error_and_not_a_short_answer() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        event = b'data: {"choices":[{"index":0,"delta":{"content":"y"}}]}\n\n'
        await send({"type": "http.response.body", "body": event})

    request = Request(model="policy", messages=[USER], sampling=Sampling(), is_stream=True)
    async with serve(broken) as root, http_backend(f"{root}/v1") as backend:
        with pytest.raises(ChatError, match="ended before the answer did"):
            async for _ in backend.stream(request):
                pass
