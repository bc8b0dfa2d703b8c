"""Your agent: one attempt at a scenario. Every model call is recorded; what is returned is the reward."""

from art_cli import Policy


async def rollout(policy: Policy, scenario: dict[str, str]) -> float:
    messages = [{"role": "user", "content": scenario["question"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    said = (reply.choices[0].message.content or "").strip(" .\n")
    return 1.0 if said.endswith(scenario["answer"]) else 0.0  # not anywhere in it: a list of all answers would pay
