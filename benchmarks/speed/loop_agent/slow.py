"""The e-mail agent with tools that take their time, and a judge that does: nothing computes while they wait."""

import asyncio
from typing import Any

from rollout import play, reward

from art_cli import Policy, Trajectory

TOOL_S = (0.2, 1.0)  # shortest and longest time of a tool call
JUDGE_S = 1.0
NUM_TURNS = 3


async def rollout(policy: Policy, scenario: dict[str, Any]) -> float:
    return reward(await play(policy, scenario, num_turns=NUM_TURNS, tool_s=TOOL_S))


async def judge(group: list[Trajectory]) -> list[float]:
    await asyncio.sleep(JUDGE_S)
    return [each.returned_reward or 0.0 for each in group]
