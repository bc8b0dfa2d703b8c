"""pydantic-ai with a tool."""

from importlib.metadata import version

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from question import QUESTION, outcome


async def rollout(policy, scenario):
    called = []
    model = OpenAIChatModel(policy.model, provider=OpenAIProvider(openai_client=policy.client))
    agent = Agent(model)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append(["add", {"a": a, "b": b}])
        return a + b

    done = await agent.run(QUESTION)
    return outcome(called, done.output, pydantic_ai=version("pydantic-ai-slim"))
