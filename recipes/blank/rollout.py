"""Your agent: one attempt at a scenario. Every model call is recorded; what is returned is the reward."""

from art_cli import Policy


async def rollout(policy: Policy, scenario: dict[str, str]) -> float:
    messages = [{"role": "user", "content": scenario["question"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return 1.0 if scenario["answer"] in (reply.choices[0].message.content or "") else 0.0
