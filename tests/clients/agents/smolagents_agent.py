from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def rollout(policy, scenario):
    model = OpenAIModel(policy.model, api_base=policy.base_url, api_key=policy.api_key)
    agent = ToolCallingAgent([add], model, max_steps=3, verbosity_level=0)
    return 1.0 if scenario["answer"] in str(agent.run(scenario["question"])) else 0.0
