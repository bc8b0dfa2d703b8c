"""Plays each scenario with the agent that it names, another file here: one run then trains all of them."""

import asyncio
import inspect
from importlib import import_module


async def rollout(policy, scenario):
    play = import_module(scenario["agent"]).rollout
    if inspect.iscoroutinefunction(play):
        return await play(policy, scenario)
    return await asyncio.to_thread(play, policy, scenario)
