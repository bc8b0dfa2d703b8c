"""The agent: it reads what the game says and types one of its commands. The reward is the score."""

import asyncio
from contextlib import closing
from typing import Any

from game import Game, Size

from art_cli import Outcome, Policy

OPENING = asyncio.Lock()  # textworld makes and opens one game at a time
SYSTEM = "You play a text game. Reply with one of the commands."
EXAMPLE_GOAL = "Your task for today is to take the ring from the red urn."
EXAMPLE = [  # what the game says, the commands that it takes, and the one that is typed
    ("You are in a hall.\nYou see a locked red urn. There is a red key on the floor.", ["take red key"], 0),
    ("You pick up the red key from the ground.", ["drop red key", "unlock red urn with red key"], 1),
    ("You unlock the red urn.", ["drop red key", "lock red urn with red key", "open red urn"], 2),
    ("You open the red urn, revealing a ring.", ["close red urn", "drop red key", "take ring from red urn"], 2),
]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    size = Size(**scenario["size"])
    async with OPENING:
        game = await asyncio.to_thread(Game, scenario["seed"], size, is_held_out=scenario["is_held_out"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for text, commands, typed in EXAMPLE:
        messages += [show(EXAMPLE_GOAL, text, commands), {"role": "assistant", "content": commands[typed]}]
    legal = []
    with closing(game):
        for _ in range(2 * size.commands):
            messages.append(show(game.goal, game.text, game.commands))
            reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
            command = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": command})
            legal.append(command in game.commands)
            game.type(command)
            if game.is_over:
                break
    return Outcome(reward=game.score, metrics={"won": game.won, "legal": sum(legal) / len(legal)})


def show(goal: str, text: str, commands: list[str]) -> dict[str, str]:
    """Returns the message to the model: the goal, what the game said, and a line for each command."""
    return {"role": "user", "content": "\n".join([goal, text, "Commands:", *commands])}
