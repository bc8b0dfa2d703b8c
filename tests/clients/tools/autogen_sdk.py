"""AutoGen: a whole run of an agent with a tool, plain and then streamed."""

import asyncio
import json
import os
from importlib.metadata import version

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

QUESTION = "What is 2 plus 3?"
INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
called = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(["add", {"a": a, "b": b}])
    return a + b


def agent(is_stream: bool = False, **client: str) -> AssistantAgent:
    model = OpenAIChatCompletionClient(
        model=os.environ["OPENAI_MODEL"], model_info=INFO, temperature=0, max_retries=0, **client
    )
    return AssistantAgent("adder", model, tools=[add], max_tool_iterations=3, model_client_stream=is_stream)


async def main() -> None:
    plain = (await agent().run(task=QUESTION)).messages[-1].content
    calls = list(called)
    text = (await agent(is_stream=True).run(task=QUESTION)).messages[-1].content
    assert text == plain and called == calls * 2, (text, plain, called)
    try:
        await agent(api_key="wrong").run(task=QUESTION)
        refused = 0
    except openai.AuthenticationError as error:
        refused = error.status_code
    print(json.dumps({"version": version("autogen-agentchat"), "calls": calls, "text": text, "refused": refused}))


asyncio.run(main())
