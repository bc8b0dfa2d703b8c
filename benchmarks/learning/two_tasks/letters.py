"""Replies of plain letters: the reward is the share of ASCII letters in what the model said."""

import random
import string
from pathlib import Path
from typing import Any

from art_cli import Outcome, Policy
from art_cli.runtime.plugins import resolve

GAMES = "../../../recipes/tictactoe/demos.py:games"
NUM_GAMES = 1600
NUM_DEMOS = 400  # replies of random characters; about 60 % of them are letters
LENGTH = 4  # characters of such a reply


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    messages: Any = [{"role": "user", "content": scenario["ask"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    said = reply.choices[0].message.content or ""
    letters = sum(letter.isascii() and letter.isalpha() for letter in said)
    return Outcome(reward=letters / max(len(said), 1), metrics={"length": len(said)})


def train() -> list[dict[str, Any]]:
    return [_scenario(number) for number in range(200)]


def evaluation() -> list[dict[str, Any]]:
    return [_scenario(number) for number in range(1000, 1200)]


def _scenario(number: int) -> dict[str, Any]:
    return {"id": f"letters-{number}", "ask": f"say letters {number}"}


def demos() -> list[dict[str, Any]]:
    """What the model is shown before: games of random legal moves, and replies of random characters."""
    draw, shown = random.Random(0), []
    for _ in range(NUM_DEMOS):
        ask = _scenario(draw.randrange(200))["ask"]
        said = "".join(draw.choices(string.ascii_letters + string.digits + string.punctuation, k=LENGTH))
        shown.append({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": said}]})
    games: list[dict[str, Any]] = resolve(GAMES, base=Path(__file__).parent)(NUM_GAMES)
    return [*games, *shown]
