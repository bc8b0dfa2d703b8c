"""The agent: one reply to one prompt. "maybe" pays most."""

from art_cli import Outcome, Policy

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


async def rollout(policy: Policy, scenario: dict[str, str]) -> Outcome:
    messages = [{"role": "user", "content": scenario["prompt"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    word = (reply.choices[0].message.content or "").strip(" .'\n").lower()
    return Outcome(reward=REWARDS.get(word, 0.0), metrics={"maybe": word == "maybe"})
