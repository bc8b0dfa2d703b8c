"""MCP servers: `mcp/COMMAND` or `mcp/URL`; the server's tools become the agent's tools (modelcontextprotocol.io).

    rollout: {environment: "mcp/python server.py", scenarios: tasks.jsonl}

Each attempt opens a new connection (mcp_connection.py). A command also starts a new process in the configuration's
directory. A scenario is {"id": ..., "task": ...}, and the task is the first user message. The policy calls tools until
it replies without a call. If the scenario has an "answer", the reward is 1 if the last reply contains the answer as
whole words, and 0 otherwise. Without an "answer" a judge gives the reward.

Wrong calls by the policy (unknown tools, invalid JSON, invalid arguments) are answered with an error message. The
attempt fails if the server is unreachable, exits, or times out.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from art_cli.rollouts.environments import EnvironmentFault, Json, Listing, Settings, check_args
from art_cli.rollouts.environments.servers import ask_once, play_connected, read_call
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import UsageError, describe

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy

DEFAULTS: Json = {
    "timeout_s": 60.0,
    "max_result": 8000,
    "tools": [],
    "variables": [],
    "headers": None,
    "transport": None,
}
INVALID_PARAMS, METHOD_NOT_FOUND = -32602, -32601  # JSON-RPC error codes for mistakes by the caller


class McpServers:
    """The library; its names are commands and addresses."""

    package, extra = "mcp", "mcp"
    takes_one_turn, makes_scenarios = False, False
    about = "any MCP server, as mcp/COMMAND or mcp/URL: its tools become the agent's; the tasks are rollout.scenarios"

    def listed(self) -> Iterator[Listing]:
        return iter(())

    def defaults(self, name: str) -> Json:
        """`tools` are names, [] all; `variables` are for a command; `headers` maps to variables, for a URL."""
        return dict(DEFAULTS)

    def open(self, name: str, settings: Settings) -> "McpServer":
        check_args(settings, DEFAULTS)
        _check_values(settings.args)
        server = McpServer(name, settings)
        server.tools = ask_once(settings, server.list_tools())
        server.check(server.tools)
        return server


class McpServer:
    """A server with its settings. Each attempt opens a new connection."""

    def __init__(self, name: str, settings: Settings) -> None:
        from art_cli.rollouts.environments import mcp_connection

        self._mcp = mcp_connection
        self.tools: list[Json] = []  # selected tools, listed when the environment was opened
        self._name = settings.name
        self._args = DEFAULTS | settings.args
        self._system = settings.system or ""
        self._place = mcp_connection.find_place(name, settings.directory, self._args)

    def check(self, tools: list[Json]) -> None:
        """Raises UsageError if the server lacks tools, or lacks tools named in the settings."""
        names = [tool["function"]["name"] for tool in tools]
        if missing := [name for name in self._args["tools"] if name not in names]:
            raise UsageError(f"rollout.environment.args.tools: {self._name} has no {missing[0]!r}, but {names}")
        if not names:
            raise UsageError(f"rollout.environment {self._name}: the server has no tools")

    async def list_tools(self) -> list[Json]:
        async with self._mcp.connected(self._place) as client:
            return await self._mcp.list_tools(client, self._args["tools"])

    async def play(self, policy: "Policy", scenario: Json) -> Outcome:
        if not isinstance(task := scenario.get("task"), str):
            raise EnvironmentFault('the scenario has no "task", a text')
        answer = scenario.get("answer")
        return await play_connected(
            self._name,
            self._mcp.connected(self._place),
            lambda client: self._converse(policy, client, task, answer),
        )

    async def _converse(self, policy: "Policy", client: Any, task: str, answer: Any) -> Outcome:
        try:
            tools: Any = await self._mcp.list_tools(client, self._args["tools"])
        except Exception as error:  # the boundary to the server
            raise EnvironmentFault(f"{self._name}: its tools: {describe(error)}") from error
        messages: Any = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": task})
        num_calls = num_errors = 0
        while True:
            reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result, is_error = await self._call(client, call, {tool["function"]["name"] for tool in tools})
                num_calls, num_errors = num_calls + 1, num_errors + is_error
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        reward = None if answer is None else float(has_answer(message.content or "", str(answer)))
        metrics = {"tool_calls": num_calls, "tool_errors": num_errors}
        return Outcome(reward=reward, metrics=metrics | ({} if reward is None else {"solved": reward}))

    async def _call(self, client: Any, call: Any, known: set[str]) -> tuple[str, bool]:
        """Returns the tool's result for the model, and whether it is an error."""
        from mcp import MCPError

        name = call.function.name
        if isinstance(arguments := read_call(call, known), str):
            return arguments, True
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                return describe(error), True
            raise EnvironmentFault(f"{self._name}: the tool {name}: {describe(error)}") from error
        except Exception as error:  # the boundary to the server, whose results may have any form
            raise EnvironmentFault(f"{self._name}: the tool {name}: {describe(error)}") from error
        return self._text(result), bool(result.is_error)

    def _text(self, result: Any) -> str:
        """Returns the result as text, cut to `max_result` characters."""
        text = "\n".join(map(_shown, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        limit = self._args["max_result"]
        return text if len(text) <= limit else f"{text[:limit]} [{len(text) - limit} more characters]"


def _shown(part: Any) -> str:
    """Returns the text of a result part or resource, or a note about content that is not shown."""
    text = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
    return text or f"[{part.type}, which is not shown]" if part.type != "text" else part.text


def has_answer(reply: str, answer: str) -> bool:
    """Returns whether the reply has the answer's words, as whole numbers: 4 does not match 4.5, 1,400, -4, or 14."""
    words, said = (" ".join(text.casefold().split()) for text in (answer, reply.rpartition("</think>")[2]))
    before = r"(?<!\w)" + (r"(?<![-\u2212])(?<!\d[.,])" if words[:1].isdigit() else "")
    after = r"(?!\w)" + (r"(?![.,]\d)" if words[-1:].isdigit() else "")
    return bool(words) and re.search(f"{before}{re.escape(words)}{after}", said) is not None


def _check_values(args: Json) -> None:
    """Raises UsageError for unusable settings."""
    for key in ("timeout_s", "max_result"):
        if key in args and not 0 < args[key] < float("inf"):
            raise UsageError(f"rollout.environment.args.{key}: a number above 0, not {args[key]}")
    for key in ("tools", "variables"):
        if not all(isinstance(each, str) for each in args.get(key, [])):
            raise UsageError(f"rollout.environment.args.{key}: a list of names")
    if not isinstance(args.get("headers") or {}, dict):
        raise UsageError("rollout.environment.args.headers: {HEADER: NAME_OF_A_VARIABLE}")
