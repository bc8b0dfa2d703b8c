"""OpenEnv servers: `openenv/URL` (github.com/meta-pytorch/OpenEnv), over WebSocket with one session per attempt.

    reset {"seed": ...} -> observation      then, until done:      the policy's reply -> step {...} -> observation

The server's schema defines an action. If the action is a single text, the reply is the action. Otherwise the reply is a
JSON object with the action's fields, and the system message contains the schema. An observation is shown as the field
named by `observation`, or as JSON. The reward is the sum of the steps' rewards, or the last reward. Without rewards
from the server a judge gives the reward. Actions that violate the schema are answered with the reason.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from art_cli.rollouts.environments import EnvironmentFault, Json, Listing, Settings, check_args, seed_of
from art_cli.rollouts.environments.servers import ask_once, play_connected
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import UsageError, describe

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy

DEFAULTS: Json = {"action": None, "observation": None, "reward": "sum", "timeout_s": 60.0, "reset": None}
MAX_ANSWER = 2**22  # maximum bytes of a server message
MAX_AHEAD = 4  # maximum unread server messages; each request has one answer
LIMITS = ("turn_limit", "context_length_exceeded")  # gateway error codes; earlier rewards count
ASK = "Each of your replies is one action: a JSON object that fits this schema, and nothing else.\n"


class OpenEnvServers:
    """The library; its names are addresses."""

    package, extra = "aiohttp", ""
    takes_one_turn, makes_scenarios = False, True
    about = "any OpenEnv server that runs already, as openenv/http://HOST:PORT"

    def listed(self) -> Iterator[Listing]:
        return iter(())

    def defaults(self, name: str) -> Json:
        """`action` and `observation` name the text fields. `reset` has extra settings for each episode."""
        return dict(DEFAULTS)

    def open(self, name: str, settings: Settings) -> "OpenEnvServer":
        check_args(settings, DEFAULTS)
        if not name.startswith(("http://", "https://")):
            raise UsageError(f"rollout.environment {settings.name}: expected openenv/http://HOST:PORT")
        if (reward := settings.args.get("reward", "sum")) not in ("sum", "last"):
            raise UsageError(f"rollout.environment.args.reward: 'sum' or 'last', not {reward!r}")
        server = OpenEnvServer(name.rstrip("/"), settings)
        server.learn(ask_once(settings, server.fetch_schema()))
        return server


class _Heard(NamedTuple):
    """A server's answer. `refusal` is the reason why the action was rejected; empty if it was accepted."""

    said: str
    reward: float | None
    is_done: bool
    refusal: str = ""


class OpenEnvServer:
    def __init__(self, url: str, settings: Settings) -> None:
        self._url, self._name = url, settings.name
        self._args = DEFAULTS | settings.args
        self._system = settings.system
        self._field: str | None = None  # action field for the reply, unless the reply is JSON
        self._schema = ""

    async def fetch_schema(self) -> Json:
        """Returns the JSON schema of an action. Raises ValueError if the schema is invalid or too large."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._args["timeout_s"])
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self._url}/schema") as answer:
            answer.raise_for_status()
            received = bytearray()
            async for piece in answer.content.iter_any():
                received += piece
                if len(received) > MAX_ANSWER:
                    raise ValueError(f"its /schema is larger than {MAX_ANSWER >> 20} MiB")
            schema = json.loads(received)
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict) or not isinstance(action.get("properties"), dict):
            raise ValueError("its /schema describes no action")
        return action

    def learn(self, schema: Json) -> None:
        """Chooses how replies become actions. Raises UsageError if the action lacks the field."""
        fields = {name: field for name, field in schema["properties"].items() if name != "metadata"}
        if (wanted := self._args["action"]) is not None and wanted not in fields:
            raise UsageError(f"rollout.environment.args.action: {self._name} has no {wanted!r}, but {sorted(fields)}")
        needed = [name for name in schema.get("required", fields) if name in fields]
        is_text = len(needed) == 1 and isinstance(fields[needed[0]], dict) and fields[needed[0]].get("type") == "string"
        self._field = wanted or (needed[0] if is_text else None)
        self._schema = json.dumps({"properties": fields, "required": needed})

    async def play(self, policy: "Policy", scenario: Json) -> Outcome:
        reset = (self._args["reset"] or {}) | {"seed": seed_of(scenario)}
        return await play_connected(self._name, self._session(), lambda session: self._converse(policy, session, reset))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator["_Session"]:
        import aiohttp

        timeout = self._args["timeout_s"]
        async with aiohttp.ClientSession() as client:
            async with asyncio.timeout(timeout):
                socket = await client.ws_connect(f"{self._url}/ws", max_msg_size=MAX_ANSWER)
            answers: asyncio.Queue[Any] = asyncio.Queue(MAX_AHEAD)
            reader = asyncio.create_task(_listen(socket, answers))
            try:
                yield _Session(self._name, socket, answers, timeout, self._args["observation"])
            finally:
                reader.cancel()
                await asyncio.wait({reader})
                await socket.close()

    async def _converse(self, policy: "Policy", session: "_Session", reset: Json) -> Outcome:
        system = self._system if self._system is not None else "" if self._field else ASK + self._schema
        messages: Any = [{"role": "system", "content": system}] if system else []
        heard, rewards, num_refused, num_steps = await session.ask("reset", reset), list[float](), 0, 0
        while not heard.is_done:
            messages.append({"role": "user", "content": heard.refusal or heard.said})
            if (reply := await _reply(policy, messages)) is None:
                break
            messages.append({"role": "assistant", "content": reply})
            action = self._action(reply.rpartition("</think>")[2].strip())
            heard = action if isinstance(action, _Heard) else await session.ask("step", action)
            num_refused, num_steps = num_refused + bool(heard.refusal), num_steps + 1
            rewards += [] if heard.reward is None else [heard.reward]
        reward = None if not rewards else sum(rewards) if self._args["reward"] == "sum" else rewards[-1]
        return Outcome(reward=reward, metrics={"steps": num_steps, "refused": num_refused, "ended": heard.is_done})

    def _action(self, reply: str) -> "Json | _Heard":
        """Returns the action, or an observation that tells the policy what is wrong."""
        if self._field is not None:
            return {self._field: reply}
        try:
            action = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
        except (ValueError, RecursionError):
            return _Heard("", None, False, "That is not a JSON object. " + ASK + self._schema)
        return action if isinstance(action, dict) else _Heard("", None, False, "That is not a JSON object.")


async def _reply(policy: "Policy", messages: Any) -> str | None:
    """Returns the policy's reply; None after a limit on calls or context."""
    import openai

    try:
        answer = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    except openai.BadRequestError as error:
        if error.code in LIMITS:
            return None
        raise
    return answer.choices[0].message.content or ""


async def _listen(socket: Any, answers: "asyncio.Queue[Any]") -> None:
    """Queues the server's messages, then the final error. Receiving answers pings while the policy thinks."""
    try:
        while True:
            await answers.put(await socket.receive_str())
    except Exception as error:  # the boundary to the server
        end = ConnectionResetError("the server has closed the connection") if socket.closed else error
        await answers.put(end)


class _Session:
    def __init__(
        self, name: str, socket: Any, answers: "asyncio.Queue[Any]", timeout_s: float, observation: str | None
    ) -> None:
        self._name, self._socket, self._answers = name, socket, answers
        self._timeout_s, self._observation = timeout_s, observation

    async def ask(self, kind: str, data: Json) -> _Heard:
        """Returns the server's answer to a reset or step. Raises EnvironmentFault unless an error is the action's."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_json({"type": kind, "data": data})
                said = await self._answers.get()
                if isinstance(said, Exception):
                    raise said
                answer = json.loads(said)
            payload = answer["data"]
            if answer["type"] == "error" and payload.get("code") == "VALIDATION_ERROR" and kind == "step":
                return _Heard(
                    "", None, False, f"That action was refused: {str(payload.get('errors') or payload)[:1000]}"
                )
            if answer["type"] != "observation":
                raise EnvironmentFault(f"{self._name}: {kind}: {str(payload)[:500]}")
            reward = payload.get("reward")
            number = None if reward is None else float(reward)
            return _Heard(self._shown(payload.get("observation")), number, bool(payload.get("done")))
        except EnvironmentFault:
            raise
        except Exception as error:  # the boundary to the server
            raise EnvironmentFault(f"{self._name}: {kind}: {describe(error)}") from error

    def _shown(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            return str(observation)
        if self._observation is not None:
            shown = observation[self._observation]
            return shown if isinstance(shown, str) else json.dumps(shown)
        return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
