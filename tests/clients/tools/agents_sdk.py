"""The OpenAI Agents SDK in chat-completions mode: a whole run of an agent with a tool, plain and then streamed."""

import asyncio
import json
import os
from importlib.metadata import version

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
called = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(["add", {"a": a, "b": b}])
    return a + b


def agent(**client: str) -> Agent:
    model = OpenAIChatCompletionsModel(os.environ["OPENAI_MODEL"], openai.AsyncOpenAI(max_retries=0, **client))
    return Agent(name="adder", model=model, tools=[add], model_settings=ModelSettings(temperature=0))


async def main() -> None:
    plain = await Runner.run(agent(), "What is 2 plus 3?")
    calls = list(called)
    streamed = Runner.run_streamed(agent(), "What is 2 plus 3?")
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == plain.final_output, (streamed.final_output, plain.final_output)
    assert called == calls * 2, called
    try:
        await Runner.run(agent(api_key="wrong"), "What is 2 plus 3?")
        refused = 0
    except openai.AuthenticationError as error:
        refused = error.status_code
    found = {"version": version("openai-agents"), "calls": calls, "text": plain.final_output, "refused": refused}
    print(json.dumps(found))


asyncio.run(main())
