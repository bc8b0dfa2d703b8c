"""pydantic-ai: a whole run of an agent with a tool, plain and then streamed."""

import asyncio
import json
import os
from importlib.metadata import version

from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is 2 plus 3?"
called = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(["add", {"a": a, "b": b}])
    return a + b


def agent(**client: str) -> Agent:
    provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], **client)
    return Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"], provider=provider), tools=[add])


async def main() -> None:
    plain = await agent().run(QUESTION, model_settings={"temperature": 0})
    calls = list(called)
    async with agent().run_stream(QUESTION, model_settings={"temperature": 0}) as streamed:
        text = await streamed.get_output()
    assert text == plain.output and called == calls * 2, (text, plain.output, called)
    try:
        await agent(api_key="wrong").run(QUESTION)
        refused = 0
    except ModelHTTPError as error:
        refused = error.status_code
    print(json.dumps({"version": version("pydantic-ai-slim"), "calls": calls, "text": text, "refused": refused}))


asyncio.run(main())
