"""A desk that books rooms, for SmolLM2-135M-Instruct: two turns, the second one reads what the first one found.

check ROOM -> book ROOM HOUR       the room that was asked for, and the only hour at which it is free
"""

import random
from typing import Any

from parcels import say  # beside this file

from art_cli import Outcome, Policy

SYSTEM = "You book rooms. Answer with one command: check ROOM, or book ROOM HOUR."
EXAMPLES = (
    ("I need the oak room.", "check oak"),
    ("Desk: oak is taken at 9 and 14, free at 11.", "book oak 11"),
    ("Could I have the pine room?", "check pine"),
    ("Desk: pine is free at 16, taken at 10 and 12.", "book pine 16"),
)
ROOMS = ("red", "blue", "green", "north", "south", "lake", "garden", "tower", "silver", "maple")
WISHES = (
    "Please find me an hour in the {room} room.",
    "Is there a free hour in {room}?",
    "We are nine people and would like the {room} room.",
    "Not the {other} room again. Give us {room}!",
)
ANSWERS = (
    "Desk: {room} is taken at {one} and {two}, free at {free}.",
    "Desk: {room} is free at {free}, taken at {one} and {two}.",
    "Desk: at {one} and {two} somebody has {room}. At {free} nobody has.",
)


def train() -> list[dict[str, Any]]:
    return _scenarios(512, seed=1)


def evaluation() -> list[dict[str, Any]]:
    return _scenarios(64, seed=2)


def _scenarios(num: int, seed: int) -> list[dict[str, Any]]:
    draw, made = random.Random(seed), []
    for place in range(num):
        room, other = draw.sample(ROOMS, 2)
        free, one, two = draw.sample(range(8, 20), 3)
        ask = draw.choice(WISHES).format(room=room, other=other)
        found = draw.choice(ANSWERS).format(room=room, free=free, one=min(one, two), two=max(one, two))
        made.append({"id": f"room-{seed}-{place}", "ask": ask, "found": found, "room": room, "free": str(free)})
    return made


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for text, command in EXAMPLES:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": command}]
    first = await say(policy, messages, scenario["ask"])
    if first != f"check {scenario['room']}":
        return Outcome(reward=0.0, metrics={"right": False})
    second = await say(policy, messages, scenario["found"])
    is_right = second == f"book {scenario['room']} {scenario['free']}"
    return Outcome(reward=1.0 if is_right else 0.3, metrics={"right": is_right})
