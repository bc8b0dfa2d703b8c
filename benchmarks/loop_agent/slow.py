"""The e-mail agent with tools that take their time, and a judge that does: nothing computes while they wait."""

import asyncio
import random
from typing import Any

from rollout import SYSTEM, output, question, reward

from art_cli import Policy, Trajectory

TOOL_S = (0.2, 1.0)  # shortest and longest time of a tool call
JUDGE_S = 1.0
NUM_TURNS = 3


async def rollout(policy: Policy, scenario: dict[str, Any]) -> float:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(scenario)}]
    replies = []
    for turn in range(NUM_TURNS):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        replies.append(reply.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": replies[-1]})
        messages.append({"role": "user", "content": output(scenario, turn)})
        await asyncio.sleep(random.uniform(*TOOL_S))
    return reward(replies)


async def judge(group: list[Trajectory]) -> list[float]:
    await asyncio.sleep(JUDGE_S)
    return [each.returned_reward or 0.0 for each in group]
