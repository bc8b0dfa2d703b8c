import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # or it sends every attempt to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(policy, scenario):
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = policy.base_url, policy.api_key
    agent = Agent(name="adder", model=policy.model, tools=[add])
    done = Runner.run_streamed(agent, scenario["question"], max_turns=4)
    async for _ in done.stream_events():
        pass
    return 1.0 if scenario["answer"] in done.final_output else 0.0
