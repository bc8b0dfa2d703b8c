"""The interface for client protocols: a protocol defined in this file works in the application and the gateway.

It differs from OpenAI's protocols in every detail of a wire: path, key, parameters, reply, events, error body, and a
second path that only counts tokens. It is a small copy of Anthropic's Messages API.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers

from art_cli.chat.chat_app import AppSettings, build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import serve
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import WIRES, Events, Wire, Wires
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import prompt, sequence
from tests.support.standins.scripted import BreakingBackend, Engine, ScriptedBackend, encode

Json = dict[str, Any]
KEY = "key-of-the-test"
FIRST = encode("<system>s\n<user>hi\n<assistant>")


class Body(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: int
    talk: list[str]
    system: str = ""
    stream: bool = False


class Talk:
    """A protocol whose request is `{"talk": ["hi", "yo", "more"]}`, the words of user and model in turns."""

    path = "/v1/talk"
    header = "x-talk"

    def key(self, headers: Headers) -> str | None:
        return headers.get("x-api-key")

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        given = convert(decode_object(body), Body)
        roles = [("user", "assistant")[place % 2] for place in range(len(given.talk))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, given.talk, strict=True)]
        return Request(
            model=given.model,
            sampling=msgspec.structs.replace(defaults, max_tokens=given.max_tokens),
            messages=[{"role": "system", "content": given.system}, *messages],
            is_stream=given.stream,
            user_set=frozenset({"max_tokens"}),
        )

    def render(self, request: Request, reply: Reply) -> bytes:
        return msgspec.json.encode({"said": reply.choices[0].text, "input_tokens": len(reply.prompt_ids)})

    def stream(self, request: Request) -> Events:
        return Pieces(self)

    def error(self, error: ChatError) -> bytes:
        return msgspec.json.encode({"type": "error", "error": {"type": error.type, "message": error.message}})

    def status(self, error: ChatError) -> int:
        return error.status


class Pieces:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._has_begun = False

    def render(self, chunk: Chunk) -> bytes:
        begin = b"" if self._has_begun else event("begin", msgspec.json.encode({"model": chunk.model}))
        self._has_begun = True
        return begin + (event("piece", msgspec.json.encode(chunk.choice.text)) if chunk.choice.text else b"")

    def finish(self) -> bytes:
        return event("end", b"{}")

    def fail(self, error: ChatError) -> bytes:
        return event("error", self._wire.error(error))


class TalkCount(Talk):
    """Answers with the number of a talk's prompt tokens. One token is sampled for it and dropped."""

    path = "/v1/talk/count"

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        request = super().parse(body, defaults)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=1)
        return msgspec.structs.replace(request, sampling=sampling, is_stream=False, is_recorded=False)

    def render(self, request: Request, reply: Reply) -> bytes:
        return msgspec.json.encode({"input_tokens": len(reply.prompt_ids)})


def event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


PLUGGED = Wires(*WIRES, Talk(), TalkCount())


@contextlib.asynccontextmanager
async def through_app(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(lambda key: backend if key == KEY else None, AppSettings(wires=PLUGGED))
    async with serve(app) as root, httpx.AsyncClient(base_url=f"{root}/v1", headers={"x-api-key": KEY}) as http:
        yield http


def talk(*said: str, **fields: Any) -> Json:
    return {"model": "policy", "max_tokens": 50, "system": "s", "talk": said, **fields}


def events_of(text: str) -> list[tuple[str, Any]]:
    """The name and the data of each event."""
    lines = [block.splitlines() for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


async def test_it_holds_a_conversation_through_the_application() -> None:
    backend = ScriptedBackend(lambda request: "yo")
    async with through_app(backend) as http:
        plain = await http.post("/talk", json=talk("hi"))
        streamed = await http.post("/talk", json=talk("hi", "yo", "more", stream=True))
        counted = await http.post("/talk/count", json=talk("hi"))
    assert plain.json() == {"said": "yo", "input_tokens": len(FIRST)}
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert events_of(streamed.text) == [("begin", {"model": "policy"}), ("piece", "y"), ("piece", "o"), ("end", {})]
    assert counted.json() == {"input_tokens": len(FIRST)}
    assert [message["content"] for message in backend.requests[1].messages or []] == ["s", "hi", "yo", "more"]


async def test_its_errors_and_its_key_are_its_own() -> None:
    async def answer(request: Request) -> str:
        raise ChatError(400, "too long")

    async with through_app(ScriptedBackend(answer)) as http:
        for body, status, message in (
            (talk("hi"), 400, "too long"),
            (talk("hi", stream=True), 400, "too long"),
            (talk("hi", model="other"), 404, "the model 'other' does not exist here; there is 'policy'"),
            ({"model": "policy"}, 400, "max_tokens: required"),
        ):
            reply = await http.post("/talk", json=body)
            assert reply.status_code == status
            assert reply.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        bearer = {"x-api-key": "", "authorization": f"Bearer {KEY}"}
        refused = await http.post("/talk", json=talk("hi"), headers=bearer)
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert (await http.get("/talk")).json()["type"] == "error"
        openai = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post("/chat/completions", json=openai)).status_code == 401  # its key is a Bearer
        assert (await http.post("/chat/completions", json=openai, headers=bearer)).json()["error"]["code"] is None
        for headers in ({}, bearer):
            assert (await http.get("/models", headers=headers)).status_code == 200


async def test_a_stream_that_breaks_ends_with_its_error_event() -> None:
    async with through_app(BreakingBackend(lambda request: "yo")) as http:
        reply = await http.post("/talk", json=talk("hi", stream=True))
    (_, (_, piece), (name, data)) = events_of(reply.text)
    assert (reply.status_code, piece, name, data["error"]["message"]) == (200, "y", "error", "the engine died")


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_the_gateway_records_its_turns_and_not_its_counts(is_stream: bool) -> None:
    """Two turns of one conversation in one sequence; five counts between them are no calls of the two allowed."""
    backend = ScriptedBackend(lambda request: "yo")
    gateway = Gateway(Engine(backend), defaults=Sampling(temperature=0.7), seed=0, max_turns=2, wires=PLUGGED)
    key = gateway.open("t0")
    async with gateway.serve() as url, httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as http:
        assert (await http.post("/talk", json=talk("hi", stream=is_stream))).status_code == 200
        for _ in range(5):
            assert (await http.post("/talk/count", json=talk("hi"))).json() == {"input_tokens": len(FIRST)}
        assert (await http.post("/talk", json=talk("hi", "yo", "more", stream=is_stream))).status_code == 200
        limited = await http.post("/talk", json=talk("hi"))
        assert (limited.status_code, limited.json()["type"]) == (400, "error")
        wrong = await http.post("/talk", json=talk("hi"), headers={"x-api-key": "wrong"})
        assert (wrong.status_code, wrong.json()["type"]) == (401, "error")
        assert "no running attempt" in wrong.json()["error"]["message"]
    recorder = gateway.close(key)
    assert recorder.num_calls == 2
    assert [prompt(recorder.turns, index) for index in range(2)] == [
        FIRST,
        [*sequence(recorder.turns, 0), *encode("<user>more\n<assistant>")],
    ]
    assert [message["content"] for message in recorder.messages] == ["s", "hi", "yo", "more", "yo"]
