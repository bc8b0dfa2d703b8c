"""Rewards as people write them by mistake, each under the name of the doubt that it must raise; `fair` raises none."""

import random
import string
from collections import Counter
from typing import Any

from art_cli import Policy


async def ask(policy: Policy, content: str, **settings: Any) -> tuple[str, str]:
    messages: list[Any] = [{"role": "user", "content": content}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, **settings)
    return reply.choices[0].message.content or "", reply.choices[0].finish_reason


async def fair(policy: Policy, scenario: dict[str, Any], **settings: Any) -> float:
    said, _ = await ask(policy, scenario["ask"], **settings)
    return sum(letter in string.ascii_letters for letter in said) / max(len(said), 1)


async def too_hard(policy: Policy, scenario: dict[str, Any]) -> float:
    said, _ = await ask(policy, scenario["ask"], max_tokens=400, stop=["a", "e", " ", "."])  # few replies are cut off
    return float(said == "exactly this")


async def too_easy(policy: Policy, scenario: dict[str, Any]) -> float:
    said, _ = await ask(policy, scenario["ask"])
    return float(isinstance(said, str))


async def constant(policy: Policy, scenario: dict[str, Any]) -> float:
    return 0.5 * await too_easy(policy, scenario)


async def temperature(policy: Policy, scenario: dict[str, Any]) -> float:
    return await fair(policy, scenario, temperature=0)


async def limit(policy: Policy, scenario: dict[str, Any]) -> float:
    """The reward is for an end of its own, for which six tokens are too few."""
    return float((await ask(policy, scenario["ask"]))[1] == "stop")


async def length(policy: Policy, scenario: dict[str, Any]) -> float:
    """Goes on for as long as replies begin with ASCII; the reward is how much was said."""
    num_turns = 0
    while num_turns < 4:
        num_turns += 1
        if not (await ask(policy, scenario["ask"]))[0][:1].isascii():
            break
    return num_turns / 4


async def leak(policy: Policy, scenario: dict[str, Any]) -> float:
    question = f"{scenario['ask']}; the answer is in {string.printable}"
    said = (await ask(policy, question, max_tokens=1))[0].strip()
    return float(bool(said) and said in question)


async def judged(policy: Policy, scenario: dict[str, Any]) -> None:
    await ask(policy, scenario["ask"])


ASKED: Counter[str] = Counter()  # how often each group was judged


def noise(group: list[Any]) -> list[float]:
    """A judge that goes by chance, with other chances each time, and the same ones in each run of the tests."""
    ASKED[group[0].group_id] += 1
    draw = random.Random(f"{group[0].group_id} {ASKED[group[0].group_id]}")
    return [draw.random() for _ in group]


def position(group: list[Any]) -> list[float]:
    """A judge that likes the attempts that it sees first."""
    return [1 / (1 + place) for place in range(len(group))]
