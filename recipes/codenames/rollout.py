"""One game: the same policy gives the clues and guesses, in two conversations. An illegal turn and the assassin lose.

Both sides have the same reward, so both conversations belong to the one trajectory and are trained on.
"""

import random
from typing import Any

from game import CLUES, deal, legal_clues, show_all, show_words

from art_cli import Outcome, Policy

SPYMASTER = f"Give a clue that is true of our words: {' '.join(CLUES)}"
GUESSER = "Guess a word by the clue"
LOST = -1.0


class Lost(Exception):
    """Ends the game; the text is the metric that says why."""


class Player:
    """One side. Each of its calls is a conversation of its own, which shows what is left on the table."""

    def __init__(self, policy: Policy, system: str) -> None:
        self._policy = policy
        self._system = system

    async def ask(self, text: str, legal: list[str] | tuple[str, ...]) -> str:
        messages: list[Any] = [{"role": "system", "content": self._system}, {"role": "user", "content": text}]
        self._policy.state(text)
        reply = await self._policy.client.chat.completions.create(model=self._policy.model, messages=messages)
        said = (reply.choices[0].message.content or "").rpartition("</think>")[2].strip()
        if said not in legal:
            raise Lost("illegal")
        return said


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    table = deal(random.Random(scenario["seed"]))
    spymaster, guesser = Player(policy, SPYMASTER), Player(policy, GUESSER)
    metrics = {"found": 0, "wrong": 0, "illegal": 0, "assassin": 0}
    try:
        for _ in range(scenario["clues"]):
            clue = await spymaster.ask(show_all(table), legal_clues(table))
            word = await guesser.ask(show_words(table, clue), table.words)
            if word == table.assassin:
                raise Lost("assassin")
            metrics["found" if word in table.ours else "wrong"] += 1
            table = table.without(word)
    except Lost as lost:
        metrics[str(lost)] = 1
        return Outcome(reward=LOST, metrics=metrics)
    return Outcome(reward=(metrics["found"] - metrics["wrong"]) / scenario["clues"], metrics=metrics)
