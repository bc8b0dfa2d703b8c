"""The client of a policy sends the very bytes that the ordinary client sends, whatever the messages are."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from art_cli.rollouts.plain_chat import MAX_DEPTH, spare_the_walk

REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}],
}
ASKED: dict[str, Any] = {"role": "user", "content": "What is left of ünïcode 🎲?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Wire:
    """Keeps what a client sends."""

    def __init__(self, status: int = 200, reply: dict[str, Any] = REPLY) -> None:
        self.bodies: list[bytes] = []
        self._status = status
        self._reply = reply

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content)
        is_first = len(self.bodies) == 1
        return httpx.Response(self._status if is_first else 200, json=self._reply, headers={"retry-after-ms": "1"})

    def client(self) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="key", http_client=http)


def _deep() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 2):
        deep = {"a": deep}
    return deep


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "system", "content": "Play."}, ASKED]},
    "tools": {"messages": [ASKED, {"role": "tool", "tool_call_id": "1", "content": [PICTURE]}], "tools": [TOOL]},
    "an answer as the client gave it": {"messages": [ASKED, ChatCompletionMessage(role="assistant", content="5")]},
    "a tuple": {"messages": (ASKED,), "tools": (TOOL,)},
    "other settings": {"messages": [ASKED], "tools": [TOOL], "stop": ["\n"], "temperature": 0.5},
    "an extra body": {"messages": [ASKED], "extra_body": {"top_k": 3}},
    "an extra body that wins": {"messages": [ASKED], "extra_body": {"messages": []}},
    "without messages": {"messages": []},
    "deep": {"messages": [ASKED], "tools": [_deep()]},
    "omitted": {"messages": [ASKED], "tools": openai.omit},
}


@pytest.mark.parametrize("name", CALLS)
def test_the_bytes_are_those_of_the_ordinary_client(name: str) -> None:
    ordinary, spared = Wire(), Wire()

    async def ask() -> list[ChatCompletion]:
        client = spared.client()
        spare_the_walk(client, openai)
        assert "create" in vars(client.chat.completions)
        clients = [ordinary.client(), client]
        return [await each.chat.completions.create(model="policy", **CALLS[name]) for each in clients]

    replies = asyncio.run(ask())
    assert ordinary.bodies == spared.bodies and replies[0] == replies[1]


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAID: dict[str, dict[str, Any]] = {
    "calls": {"role": "assistant", "content": None, "tool_calls": [CALL]},
    "a thought, which the client has no field for": {"role": "assistant", "content": "5", "reasoning_content": "hm"},
    "no role": {"content": "5"},
    "a kind of call that the client does not know": {"role": "assistant", "tool_calls": [{"type": "other", "id": 3}]},
}


@pytest.mark.parametrize("name", SAID)
def test_the_reply_is_read_as_the_ordinary_client_reads_it(name: str) -> None:
    reply = {**REPLY, "choices": [{**REPLY["choices"][0], "message": SAID[name]}], "step": 3}  # type: ignore[index]

    async def ask() -> list[ChatCompletion]:
        clients = [Wire(reply=reply).client() for _ in range(2)]
        spare_the_walk(clients[1], openai)
        return [await each.chat.completions.create(model="policy", messages=[ASKED]) for each in clients]  # type: ignore[list-item]

    ordinary, spared = asyncio.run(ask())
    assert ordinary == spared and type(spared) is ChatCompletion
    assert ordinary.model_dump(exclude_unset=True, warnings=False) == spared.model_dump(
        exclude_unset=True, warnings=False
    )


def test_a_sync_client_a_raw_response_and_a_stream_send_the_same_too() -> None:
    ordinary, spared = Wire(), Wire()
    for wire in (ordinary, spared):
        http = httpx.Client(transport=httpx.MockTransport(wire))
        client = openai.OpenAI(base_url="http://gateway/v1", api_key="key", http_client=http)
        if wire is spared:
            spare_the_walk(client, openai)
        client.chat.completions.create(model="policy", messages=[ASKED])
        raw = client.chat.completions.with_raw_response.create(model="policy", messages=[ASKED])
        assert raw.http_response.json() == REPLY
        client.chat.completions.create(model="policy", messages=[ASKED], stream=True)
        client.with_options(timeout=3).chat.completions.create(model="policy", messages=[ASKED])
    assert ordinary.bodies == spared.bodies and len(spared.bodies) == 4


def test_messages_that_change_while_a_call_is_on_its_way_are_sent_as_they_were() -> None:
    """The conversation goes on while the client tries a call again."""
    wire = Wire(status=500)
    messages = [ASKED | {"content": [{"type": "text", "text": "first"}]}]

    async def ask() -> None:
        client = wire.client()
        spare_the_walk(client, openai)
        call = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))  # type: ignore[arg-type]
        while not wire.bodies:
            await asyncio.sleep(0)
        messages[0]["content"][0]["text"] = "second"
        messages.append(ASKED)
        await call

    asyncio.run(ask())
    first, again = (json.loads(body)["messages"] for body in wire.bodies)
    assert first == again == [{"role": "user", "content": [{"type": "text", "text": "first"}]}]


def test_a_tracer_around_the_clients_method_sees_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    create = AsyncCompletions.create

    async def traced(self: AsyncCompletions, **given: Any) -> Any:
        seen.append(given["messages"])
        return await create(self, **given)

    monkeypatch.setattr(AsyncCompletions, "create", traced)
    wire = Wire()

    async def ask() -> None:
        client = wire.client()
        spare_the_walk(client, openai)
        assert "create" not in vars(client.chat.completions)
        await client.chat.completions.create(model="policy", messages=[ASKED])  # type: ignore[list-item]

    asyncio.run(ask())
    assert seen == [[ASKED]] and json.loads(wire.bodies[0])["messages"] == [ASKED]
