"""An episode with the sizes of an e-mail agent. What the policy says changes only the reward, which is arbitrary.

Both sides of benchmarks/speed/loop.py play it: the sizes in tokens are the same, whatever is sampled.
"""

import asyncio
import random
import zlib
from typing import Any

from model import words

from art_cli import Outcome, Policy

NUM_SYSTEM, NUM_QUESTION, NUM_OUTPUT = 800, 30, 150  # tokens of each text
NUM_TURNS = 4
FREQUENT = words()[:1500]  # words of one token each


def text_of(seed: object, length: int) -> str:
    return "".join(" " + word for word in random.Random(str(seed)).choices(FREQUENT, k=length))


SYSTEM = text_of("system", NUM_SYSTEM)


def question(scenario: dict[str, Any]) -> str:
    return text_of(scenario["id"], NUM_QUESTION)


def output(scenario: dict[str, Any], turn: int) -> str:
    """What the tool that the policy's reply of this turn called says."""
    return text_of((scenario["id"], turn), NUM_OUTPUT)


def reward(replies: list[str]) -> float:
    return zlib.crc32("".join(replies).encode()) % 1000 / 1000


def scenarios() -> list[dict[str, Any]]:
    return [{"id": f"mail-{number}"} for number in range(400)]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    return Outcome(reward=reward(await play(policy, scenario)))


async def play(
    policy: Policy, scenario: dict[str, Any], *, num_turns: int = NUM_TURNS, tool_s: tuple[float, float] | None = None
) -> list[str]:
    """Returns the replies. `tool_s`: shortest and longest time of a tool call in seconds, or None if it takes none."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(scenario)}]
    replies = []
    for turn in range(num_turns):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        replies.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": replies[-1]})
        messages.append({"role": "user", "content": output(scenario, turn)})
        if tool_s is not None:
            await asyncio.sleep(random.uniform(*tool_s))
    return replies
