"""The OpenAI Agents SDK as it comes: it finds the policy in the environment, and speaks the Responses."""

import os
from importlib.metadata import version

from agents import Agent, Runner, function_tool, set_tracing_disabled
from question import QUESTION, outcome

set_tracing_disabled(True)


async def rollout(policy, scenario):
    called = []
    os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = policy.base_url, policy.api_key

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append(["add", {"a": a, "b": b}])
        return a + b

    agent = Agent(name="adder", model=policy.model, tools=[add])
    done = Runner.run_streamed(agent, QUESTION, max_turns=3)
    async for _ in done.stream_events():
        pass
    return outcome(called, done.final_output, agents=version("openai-agents"))
