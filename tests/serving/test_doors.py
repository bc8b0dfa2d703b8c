"""Whom `art serve`, the rollouts' gateway and `art gateway` let in, by every route, method and form of a key.

The routes are those of each server's router (tests/support/attacks/doors.py), so that a new one is tried as soon as it
exists.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from art_cli.chat.api_keys import Keys
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.rollout_gateway import Gateway
from tests.support.attacks.doors import (
    METHODS,
    WEBSOCKET,
    Knock,
    ask,
    ask_app,
    knocks,
    malformed_keys,
    paths_of,
    send,
    tells_nothing,
)
from tests.support.processes.waiting import until
from tests.support.servers.served import ScriptedLoader
from tests.support.servers.serving import USER, Gate, serving
from tests.support.standins.scripted import Engine, ScriptedBackend

KEY = "right-key-of-a-server-0123456789-abcdefghij"
OTHER = KEY[:32] + "-of-another-client"  # the same first 32 characters
ANTHROPIC = "/v1/messages"


class Door(NamedTuple):
    """A server of ours that listens, and has KEY and OTHER."""

    root: str
    app: Any
    routes: Any
    key: str
    other: str


@contextlib.asynccontextmanager
async def art_serve(place: Path, backend: ScriptedBackend) -> AsyncIterator[Door]:
    loader = ScriptedLoader(backend._answer)
    async with serving(loader=loader, keys=Keys([KEY, OTHER]), host="0.0.0.0") as (service, root):
        yield Door(root, service.app, service.app._app.routes, KEY, OTHER)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def rollout_gateway(place: Path, backend: ScriptedBackend) -> AsyncIterator[Door]:
    gateway = Gateway(Engine(backend), defaults=Sampling(), seed=0, max_turns=10**6)
    async with gateway.serve() as url:
        routes = gateway.app._app.routes  # type: ignore[attr-defined]
        yield Door(url.removesuffix("/v1"), gateway.app, routes, gateway.open("a"), gateway.open("b"))


@contextlib.asynccontextmanager
async def art_gateway(place: Path, backend: ScriptedBackend) -> AsyncIterator[Door]:
    from tests.serving.test_capture import ANN, BOB, standing

    async with standing(place, backend) as gateway:
        routes = gateway.service.app._app._app.routes  # type: ignore[attr-defined]
        yield Door(str(gateway.http.base_url).rstrip("/"), gateway.service.app, routes, ANN, BOB)


Opened = Callable[[Path, ScriptedBackend], AbstractAsyncContextManager[Door]]
SERVERS: list[Opened] = [art_serve, rollout_gateway, art_gateway]
each_server = pytest.mark.parametrize("opened", SERVERS, ids=lambda opened: opened.__name__)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.slow
@each_server
async def test_no_route_opens_without_the_key_and_all_refusals_are_one(opened: Opened, tmp_path: Path) -> None:
    """Nothing reaches the backend, and a client without the key learns not even which paths and methods there are."""
    heard: list[Request] = []
    async with opened(tmp_path, ScriptedBackend(lambda request: heard.append(request) or "ok")) as door:
        assert {"/v1/chat/completions", "/v1/models", "/health"} < set(paths_of(door.routes))
        tried = knocks(door.routes, door.key, open_paths=("/health",))
        answers = [(knock, await ask_app(door.app, knock)) for knock in tried]
        for method in METHODS:
            assert (await ask(door.root, Knock(method, "/health", "none", ()))).status in (200, 405)
        upgrade = Knock("GET", "/v1/chat/completions", "a websocket", WEBSOCKET)
        assert (await ask(door.root, upgrade)).status == 401
    opened_to = [(knock, answer.status) for knock, answer in answers if answer.status != 401]
    assert len(answers) > 2000 and opened_to[:5] == []
    assert not heard
    bodies: dict[bool, set[bytes]] = {True: set(), False: set()}
    for knock, answer in answers:
        if knock.method != "HEAD":
            is_anthropics = knock.target.removeprefix("http://localhost").partition("?")[0] in (
                ANTHROPIC,
                f"{ANTHROPIC}/count_tokens",
            )
            bodies[is_anthropics].add(answer.body)
    for texts in bodies.values():
        assert len(texts) <= 2, texts  # one for no key, one for a wrong key
        assert not any(key.encode() in text for text in texts for key in (door.key, door.other))


@pytest.mark.slow
@each_server
async def test_a_key_that_is_no_text_is_a_refusal_that_shows_nothing(opened: Opened, tmp_path: Path) -> None:
    """In the way of each error: a path that exists, one that does not, a wrong method, a body that is no JSON."""
    places = [("POST", "/v1/chat/completions"), ("POST", ANTHROPIC), ("GET", "/v1/models/nope"), ("PUT", "/nowhere")]
    async with opened(tmp_path, ScriptedBackend()) as door:
        tried = [
            Knock(method, path, name, headers)
            for method, path in places
            for name, headers in malformed_keys(door.key).items()
        ]
        answers = [(knock, await ask(door.root, knock)) for knock in tried]
        good = await ask(
            door.root, Knock("GET", "/v1/models", "right", ((b"Authorization", f"Bearer {door.key}".encode()),))
        )
    assert good.status == 200
    for knock, answer in answers:
        assert answer.status in (0, 400, 401, 431), (knock.method, knock.target, knock.name, answer)
        assert answer.status or "1 MiB" in knock.name, knock.name  # its sender may see the connection end instead
        assert tells_nothing(answer, door.key, door.root, tmp_path), (knock.name, answer.body)


@each_server
async def test_a_request_with_two_lengths_or_hosts_is_never_two_requests(opened: Opened, tmp_path: Path) -> None:
    """Behind a proxy that reads such a request otherwise, the second one would be another client's."""
    heard: list[Request] = []
    body = json.dumps({"model": "policy", "messages": [USER]}).encode()
    async with opened(tmp_path, ScriptedBackend(lambda request: heard.append(request) or "ok")) as door:
        key = f"Authorization: Bearer {door.key}\r\n".encode()
        inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + key + b"\r\n"
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + key
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        length = b"Content-Length: %d\r\n"
        refused = {
            "two lengths": head + length % len(body) + length % (len(body) + len(inner)) + b"\r\n" + body + inner,
            "lengths in one": head + b"Content-Length: %d, %d\r\n\r\n" % (len(body), 0) + body + inner,
            "length, chunked": head + length % 5 + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + inner,
            "chunked, length": head + b"Transfer-Encoding: chunked\r\n" + length % 5 + b"\r\n" + chunked + inner,
            "chunked otherwise": head + b"Transfer-Encoding: chunked, identity\r\n" + length % 5 + b"\r\n" + chunked,
            "hidden chunked": head + b"Transfer-Encoding : chunked\r\n" + length % 5 + b"\r\n" + chunked + inner,
            "signed length": head + b"Content-Length: +%d\r\n\r\n" % len(body) + body + inner,
            "negative length": head + b"Content-Length: -1\r\n\r\n" + body + inner,
            "line ends": head.replace(b"\r\n", b"\n") + length % len(body) + b"\n" + body,
            "1 MiB in one header": head + b"X: " + b"x" * 2**20 + b"\r\n\r\n",
            "20,000 headers": head + b"".join(b"X-%d: 1\r\n" % n for n in range(20_000)) + b"\r\n",
        }
        for name, data in refused.items():
            answer = await send(door.root, data)
            assert answer.status in (0, 400, 408, 421, 431), (name, answer)
            assert not answer.rest, (name, answer.rest)
        assert not heard
        many = head + b"".join(b"X-%d: 1\r\n" % n for n in range(1000)) + length % len(body)
        answer = await send(door.root, many + b"Connection: close\r\n\r\n" + body)
        assert answer.status == 200 and not answer.rest
        twice = await send(door.root, many + b"Host: evil.example\r\nConnection: close\r\n\r\n" + body)
        assert twice.status in (200, 400, 421) and not twice.rest


@each_server
async def test_a_response_is_kept_for_its_own_key_alone(opened: Opened, tmp_path: Path) -> None:
    """Another key, also one that begins alike, gets what an id gets that never was."""
    heard: list[str] = []

    def answer(request: Request) -> str:
        heard.append(str(request.messages))
        return "secret words" if "one" in heard[-1] else "ok"

    async with opened(tmp_path, ScriptedBackend(answer)) as door, httpx.AsyncClient(base_url=door.root) as http:

        async def follow(key: str, id: str) -> httpx.Response:
            body = {"model": "policy", "input": "two", "previous_response_id": id}
            return await http.post("/v1/responses", json=body, headers=bearer(key))

        made = await http.post("/v1/responses", json={"model": "policy", "input": "one"}, headers=bearer(door.key))
        id = made.json()["id"]
        unknown = await follow(door.other, id[:-4] + "ffff")
        foreign = await follow(door.other, id)
        own = await follow(door.key, id)
    assert (own.status_code, foreign.status_code) == (200, 400)
    assert foreign.content == unknown.content
    assert ["secret words" in messages for messages in heard] == [False, True]


async def test_each_header_that_carries_a_key_meets_the_same_limits() -> None:
    """413 for a long body, 400 for a broken one, 429 when it is full: by Authorization and by x-api-key alike."""
    gate = Gate()
    body = {"model": "policy", "messages": [USER], "max_tokens": 4}
    doors = [("/v1/chat/completions", "Authorization"), (ANTHROPIC, "Authorization"), (ANTHROPIC, "X-Api-Key")]
    async with (
        serving(loader=ScriptedLoader(gate), keys=Keys([KEY]), concurrency=1, queue=0, max_body_bytes=1000) as (
            service,
            root,
        ),
        httpx.AsyncClient(base_url=root) as http,
    ):

        async def post(number: int, **given: Any) -> httpx.Response:
            path, name = doors[number]
            return await http.post(path, headers={name: KEY if name == "X-Api-Key" else f"Bearer {KEY}"}, **given)

        for number in range(len(doors)):
            assert (await post(number, content=b"x" * 1001)).status_code == 413
            assert (await post(number, content=b"{")).status_code == 400
            first = asyncio.create_task(post(number, json=body))
            await until(lambda: gate.num_waiting == 1)
            for other in range(len(doors)):
                assert (await post(other, json=body)).status_code in (429, 529)
            gate.is_open.set()
            assert (await first).status_code == 200
            gate.is_open.clear()
    assert service.admission.num_in_flight == 0
