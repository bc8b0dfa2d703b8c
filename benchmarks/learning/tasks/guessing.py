"""A text game of textarena, GuessTheNumber: a number from 1 to 10 in four guesses, each answered by higher or lower.

The environment says every word but its long instructions, of which the line with the numbers is kept. A guess without
the right form, or made before, loses. The warm-up shows different random guesses, which ignore what was answered:
they win four games in ten. Halving what is left wins all.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

from art_cli import Outcome, Policy
from art_cli.models import builtin_models

NUMBERS, NUM_GUESSES = (1, 10), 4
NUM_DEMOS = 3200


class Game:
    """One game; `said` is what the player is told next, None when the game is over."""

    def __init__(self, seed: str) -> None:
        self._env: Any = GuessTheNumberEnv(*NUMBERS, max_turns=NUM_GUESSES - 1)  # it looks before it counts a guess
        self._env.reset(num_players=1, seed=random.Random(seed).randrange(2**31))
        self._env.state.error_allowance = 0
        self.said: str | None = self._heard().splitlines()[1]

    def guess(self, reply: str) -> None:
        is_done, _ = self._env.step(reply)
        self.said = None if is_done else self._heard()

    def _heard(self) -> str:
        """The newest thing that the environment said."""
        _, observations = self._env.get_observation()
        text: str = observations[-1][1]
        return text

    @property
    def is_won(self) -> bool:
        return self.said is None and self._env.state.rewards == {0: 1}


def base(directory: Path) -> None:
    """Writes a random model of a million parameters in which each word of the game is one token."""
    said = [message["content"] for demo in demos() for message in demo["messages"]]
    builtin_models.build(directory, builtin_models.make_tokenizer(said))


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    game, messages = Game(scenario["id"]), []
    while game.said is not None:
        messages.append({"role": "user", "content": game.said})
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        game.guess(messages[-1]["content"])
    return Outcome(reward=float(game.is_won), metrics={"solved": float(game.is_won), "guesses": len(messages) // 2})


def train() -> Iterator[dict[str, Any]]:
    return ({"id": f"train-{number}"} for number in range(2000))


def evaluation() -> Iterator[dict[str, Any]]:
    return ({"id": f"eval-{number}"} for number in range(400))


def demos() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [_demo(f"demo-{number}", draw) for number in range(NUM_DEMOS)]


def _demo(seed: str, draw: random.Random) -> dict[str, Any]:
    game, messages = Game(seed), []
    for number in draw.sample(range(NUMBERS[0], NUMBERS[1] + 1), NUM_GUESSES):
        if game.said is None:
            break
        messages += [{"role": "user", "content": game.said}, {"role": "assistant", "content": f"[{number}]"}]
        game.guess(f"[{number}]")
    return {"messages": messages}
