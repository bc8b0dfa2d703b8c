"""An OpenEnv server as an environment, over its WebSocket protocol: reset, followed by steps."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from art_cli.chat.requests import Sampling
from art_cli.rollouts.environments import Settings, openenv_servers
from art_cli.rollouts.environments.openenv_servers import OpenEnvServer
from art_cli.rollouts.function_rollout import FunctionRollout
from art_cli.rollouts.policy import Policy
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.outcome import Outcome
from tests.support.standins.scripted import Engine, ScriptedBackend

TEXT = {"properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["guess"]}
NUMBERS = {"properties": {"guess": {"type": "integer"}}, "required": ["guess"]}


class Guessing:
    """A server of OpenEnv 0.10's protocol: the number to be guessed is the seed, each wrong guess costs 0.25."""

    def __init__(self, action: dict[str, Any], *, heartbeat: float | None = None) -> None:
        self.action, self.heartbeat = action, heartbeat
        self.app = web.Application()
        self.app.add_routes([web.get("/schema", self.schema), web.get("/ws", self.play)])

    async def schema(self, request: web.Request) -> web.StreamResponse:
        """The answer comes in two pieces, as a long one does."""
        body = json.dumps({"action": self.action, "observation": {}}).encode()
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (body[:20], body[20:]):
            await response.write(piece)
            await asyncio.sleep(0.02)
        return response

    async def play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        number = None
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                number = asked["data"]["seed"]
                told = {"type": "observation", "data": _observed("Guess.", None, False)}
            elif asked["data"].get("guess") == "break":
                told = {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
            elif str(asked["data"].get("guess")).isdigit():
                is_right = int(asked["data"]["guess"]) == number
                told = {"type": "observation", "data": _observed("no", 1.0 if is_right else -0.25, is_right)}
            else:
                told = {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": "guess: a number"}}
            await socket.send_json(told)
        return socket


def _observed(text: str, reward: float | None, done: bool) -> dict[str, Any]:
    return {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}


@asynccontextmanager
async def opened(
    action: dict[str, Any], *, heartbeat: float | None = None, **args: Any
) -> AsyncIterator[OpenEnvServer]:
    runner = web.AppRunner(Guessing(action, heartbeat=heartbeat).app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = OpenEnvServer(url, Settings(f"openenv/{url}", args))
    try:
        server.learn(await server.fetch_schema())
        yield server
    finally:
        await runner.cleanup()


async def played(server: OpenEnvServer, *replies: str, max_turns: int = 9) -> tuple[Outcome, ScriptedBackend]:
    said: Iterator[str] = iter(replies)
    backend = ScriptedBackend(lambda request: next(said))
    gateway = Gateway(Engine(backend), defaults=Sampling(), seed=0, max_turns=max_turns)
    key = gateway.open("t0")
    async with gateway.serve() as url:
        policy = Policy(base_url=url, api_key=key, model="policy", step=0)
        rollout = FunctionRollout(server.play, entry="openenv", root=Path.cwd())
        try:
            return await rollout.play(policy, {"id": "7", "seed": 7}), backend
        finally:
            await rollout.close()


async def test_a_reply_is_the_action_where_that_is_one_text() -> None:
    """Two wrong guesses and the right one: 1 - 0.25 - 0.25. A refused one is told why, and costs nothing."""
    async with opened(TEXT, observation="text") as server:
        outcome, backend = await played(server, "3", "<think>7</think>4", "what?", "7")
    assert outcome.reward == 0.5
    assert outcome.metrics == {"steps": 4, "refused": 1, "ended": 1}
    said = [str(message["content"]) for message in backend.requests[-1].messages]
    assert said[::2] == ["Guess.", "no", "no", "That action was refused: guess: a number"]


async def test_a_session_lives_while_the_policy_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server pings every second, and ends a session without a pong for half a second."""
    heard = openenv_servers._reply

    async def slowly(*asked: Any) -> str | None:
        await asyncio.sleep(3.0)
        return await heard(*asked)

    monkeypatch.setattr(openenv_servers, "_reply", slowly)
    async with opened(TEXT, heartbeat=1.0) as server:
        outcome, _ = await played(server, "7")
    assert outcome.reward == 1.0


async def test_a_reply_is_json_where_an_action_is_more_than_a_text() -> None:
    async with opened(NUMBERS, reward="last") as server:
        outcome, backend = await played(server, "seven", 'I say ```{"guess": 6}```', '{"guess": 7}')
    assert outcome.reward == 1.0 and outcome.metrics["refused"] == 1
    assert json.dumps(NUMBERS["properties"]) in str(backend.requests[0].messages[0]["content"])


async def test_what_was_earned_before_a_limit_counts() -> None:
    async with opened(TEXT) as server:
        outcome, _ = await played(server, "1", "2", max_turns=2)
    assert (outcome.reward, outcome.metrics["ended"]) == (-0.5, 0)


async def test_a_server_that_breaks_fails_the_attempt() -> None:
    async with opened(TEXT) as server:
        with pytest.raises(Exception, match="EnvironmentFault.*it broke"):
            await played(server, "break")
    with pytest.raises(aiohttp.ClientConnectionError):
        await server.fetch_schema()


async def test_a_schema_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_servers, "MAX_ANSWER", 50)
    with pytest.raises(ValueError, match="its /schema is larger"):
        async with opened(TEXT):
            pass
