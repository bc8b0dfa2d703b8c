from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # or it sends every attempt to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(policy, scenario):
    model = OpenAIChatCompletionsModel(policy.model, policy.client)
    done = await Runner.run(Agent(name="adder", model=model, tools=[add]), scenario["question"], max_turns=4)
    return 1.0 if scenario["answer"] in done.final_output else 0.0
