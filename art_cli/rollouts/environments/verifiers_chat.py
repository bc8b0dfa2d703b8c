"""ChatHarness for verifiers tasksets without a harness: a conversation with the task's tools, in this process.

verifiers' own harnesses are programs that uv installs on first use and that take seconds to start. The conversation
ends with the first reply without a tool call.
"""

import sys
from contextlib import AsyncExitStack
from typing import Any

import openai
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from art_cli.rollouts.environments.servers import read_call

ID = "art_chat"  # module name under which verifiers imports this file
MAX_RESULT = 20_000  # maximum characters of a tool result shown to the policy

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]  # verifiers is not where mypy runs
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = openai.DefaultAsyncHttpxClient(timeout=None, verify=endpoint.startswith("https:"))
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None, http_client=http)
            )
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            try:
                while calls := await _turn(client, ctx.model, messages, tools):
                    for call in calls:
                        result = await _result(connections, places, call)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            except openai.APIError as error:  # a limit, a stop condition of the task, or a refusal by the gateway
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _turn(client: openai.AsyncOpenAI, model: str, messages: list[Any], tools: list[Any]) -> list[Any]:
    offered: dict[str, Any] = {"tools": tools} if tools else {}
    reply = await client.chat.completions.create(model=model, messages=messages, **offered)
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return list(message.tool_calls or ())


async def _result(connections: Any, places: Any, call: Any) -> str:
    if isinstance(arguments := read_call(call, places), str):
        return arguments
    content = await call_mcp(connections, places, call.function.name, arguments)
    if isinstance(content, list):
        parts = [part.get("text", f"[{part['type']}, which is not shown]") for part in content]
        content = "\n".join(parts)
    return content if len(content) <= MAX_RESULT else f"{content[:MAX_RESULT]} [{len(content)} characters in all]"


sys.modules.setdefault(ID, sys.modules[__name__])  # verifiers imports a harness by a name without dots
