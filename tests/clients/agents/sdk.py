"""The OpenAI Agents SDK, told to use chat completions."""

from importlib.metadata import version

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from question import QUESTION, outcome

set_tracing_disabled(True)


async def rollout(policy, scenario):
    called = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append(["add", {"a": a, "b": b}])
        return a + b

    agent = Agent(name="adder", model=OpenAIChatCompletionsModel(policy.model, policy.client), tools=[add])
    done = await Runner.run(agent, QUESTION, max_turns=3)
    return outcome(called, done.final_output, agents=version("openai-agents"))
