"""The judge server's rule for the demo says of every game what the recipe's own reward says."""

import random
from types import SimpleNamespace
from typing import Any

from art_cli.runtime.plugins import resolve
from tests.support.judges.tictactoe_rule import rule
from tests.support.paths import TICTACTOE


class Player:
    """Stands in for the policy: random moves, mostly legal, and keeps the conversation."""

    model = "random"

    def __init__(self, seed: int) -> None:
        self.rng, self.messages = random.Random(seed), []
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=self))

    def state(self, key: str) -> None:
        """Nothing is compared here."""

    async def create(self, *, model: str, messages: list[Any]) -> Any:
        free = [cell for cell in messages[-1]["content"].split() if cell.isdigit()]
        move = self.rng.choice(free) if self.rng.random() < 0.97 else self.rng.choice(["", "X", "9 1", "none"])
        self.messages = [*messages, {"role": "assistant", "content": move}]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=move))])


async def test_a_thousand_games_are_worth_what_the_rollout_returned() -> None:
    rollout = resolve("rollout.py:rollout", base=TICTACTOE)
    seen = set()
    for seed in range(1000):
        player = Player(seed)
        outcome = await rollout(player, {"seed": f"s{seed}", "starts": seed % 2 == 0})
        conversation = [(message["role"], message["content"]) for message in player.messages]
        assert rule([conversation]) == outcome.reward, conversation
        seen.add(outcome.reward)
    assert seen == {0.0, 0.5, 1.0}
