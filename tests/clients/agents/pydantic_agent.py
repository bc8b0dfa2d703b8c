from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(policy, scenario):
    model = OpenAIChatModel(policy.model, provider=OpenAIProvider(openai_client=policy.client))
    done = await Agent(model, tools=[add]).run(scenario["question"])
    return 1.0 if scenario["answer"] in done.output else 0.0
