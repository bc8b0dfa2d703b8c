from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(policy, scenario):
    model = OpenAIChatCompletionClient(
        model=policy.model, base_url=policy.base_url, api_key=policy.api_key, model_info=INFO
    )
    agent = AssistantAgent("adder", model, tools=[add], max_tool_iterations=4)
    done = await agent.run(task=scenario["question"])
    return 1.0 if scenario["answer"] in done.messages[-1].content else 0.0
