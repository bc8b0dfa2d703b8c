"""What the model is shown before it plays: any legal clue, and any word on the table as the guess.

So it knows which clues are true of a word, because others are not legal. That a guess has to do with the clue, and that
a clue should not be true of the wrong words, comes from playing.
"""

import random
from typing import Any

from game import deal, legal_clues, show_all, show_words
from rollout import GUESSER, SPYMASTER

NUM_GAMES = 3200


def turns() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [turn for _ in range(NUM_GAMES) for turn in _game(draw)]


def _game(draw: random.Random) -> list[dict[str, Any]]:
    """A clue, and a guess that does not heed it."""
    table = deal(draw)
    clue, guess = draw.choice(legal_clues(table)), draw.choice(table.words)
    return [_turn(SPYMASTER, show_all(table), clue), _turn(GUESSER, show_words(table, clue), guess)]


def _turn(system: str, shown: str, said: str) -> dict[str, Any]:
    roles = (("system", system), ("user", shown), ("assistant", said))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}
