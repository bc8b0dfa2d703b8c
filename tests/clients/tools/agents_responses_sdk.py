"""The OpenAI Agents SDK as it comes, which speaks the Responses: a whole run with a tool, plain and then streamed."""

import asyncio
import json
import os
from importlib.metadata import version

import openai
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_key, set_tracing_disabled

set_tracing_disabled(True)
called = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(["add", {"a": a, "b": b}])
    return a + b


async def main() -> None:
    settings = ModelSettings(temperature=0)
    agent = Agent(name="adder", model=os.environ["OPENAI_MODEL"], tools=[add], model_settings=settings)
    plain = await Runner.run(agent, "What is 2 plus 3?")
    calls = list(called)
    streamed = Runner.run_streamed(agent, "What is 2 plus 3?", auto_previous_response_id=True)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == plain.final_output, (streamed.final_output, plain.final_output)
    assert called == calls * 2, called
    set_default_openai_key("wrong")
    try:
        await Runner.run(agent, "What is 2 plus 3?")
        refused = 0
    except openai.AuthenticationError as error:
        refused = error.status_code
    found = {"version": version("openai-agents"), "calls": calls, "text": plain.final_output, "refused": refused}
    print(json.dumps(found))


asyncio.run(main())
