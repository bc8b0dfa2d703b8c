"""The agent: one reply to one prompt, after two examples of how to reply. "maybe" pays most."""

from typing import Any

from art_cli import Outcome, Policy

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
EXAMPLES: list[Any] = [
    {"role": "system", "content": "You answer with one word."},
    {"role": "user", "content": "Answer with red or blue."},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "Answer with red, blue or perhaps."},
    {"role": "assistant", "content": "perhaps"},
]


async def rollout(policy: Policy, scenario: dict[str, str]) -> Outcome:
    messages = [*EXAMPLES, {"role": "user", "content": scenario["prompt"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    word = (reply.choices[0].message.content or "").strip(" .'\n").lower()
    return Outcome(reward=REWARDS.get(word, 0.0), metrics={"maybe": word == "maybe"})
