"""The Claude Agent SDK with one tool. Its command line, Claude Code, plays the conversation without its own tools."""

import tempfile
from pathlib import Path

from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ToolUseBlock,
    __version__,
    create_sdk_mcp_server,
    tool,
)
from question import PARAMETERS, QUESTION, outcome


@tool("add", "Add two numbers.", PARAMETERS)
async def add(values):
    return {"content": [{"type": "text", "text": str(values["a"] + values["b"])}]}


async def rollout(policy, scenario):
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "ANTHROPIC_BASE_URL": policy.anthropic_base_url,
            "ANTHROPIC_API_KEY": policy.api_key,
            "CLAUDE_CONFIG_DIR": str(Path(home) / "claude"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        options = ClaudeAgentOptions(
            model=policy.model,
            system_prompt="Add.",
            tools=[],
            mcp_servers={"adder": create_sdk_mcp_server("adder", tools=[add])},
            allowed_tools=["mcp__adder__add"],
            setting_sources=[],
            cwd=home,
            env=environment,
        )
        called, text = [], ""
        async with ClaudeSDKClient(options) as client:
            await client.query(QUESTION)
            async for message in client.receive_response():
                if isinstance(message, AssistantMessage):
                    called += [[b.name, b.input] for b in message.content if isinstance(b, ToolUseBlock)]
                text = getattr(message, "result", None) or text
    called = [[name.removeprefix("mcp__adder__"), values] for name, values in called]
    return outcome(called, text, claude_agent_sdk=__version__)
