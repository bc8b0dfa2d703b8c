from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(policy, scenario):
    model = ChatOpenAI(model=policy.model, base_url=policy.base_url, api_key=policy.api_key)
    question = {"role": "user", "content": scenario["question"]}
    done = await create_agent(model, [add]).ainvoke({"messages": [question]})
    return 1.0 if scenario["answer"] in done["messages"][-1].content else 0.0
