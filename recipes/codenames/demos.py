"""What the model is shown before it plays: what words mean, any legal clue, and any word on the table as the guess.

A model from a hub knows what words mean; this one has to be told. That a guess has to do with the clue, and that a clue
should not be true of the wrong words, comes from playing.
"""

import random
from typing import Any

from game import CLUES, MEANINGS, deal, legal_clues, show_all, show_words
from rollout import GUESSER, SPYMASTER

NUM_GAMES = 2600
VOCABULARY = "Name a word by the clue"


def turns() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [turn for _ in range(NUM_GAMES) for turn in (*_game(draw), _word(draw))]


def _word(draw: random.Random) -> dict[str, Any]:
    """What a clue means, and no game: any word that it is true of."""
    clue = draw.choice(CLUES)
    return _turn(VOCABULARY, f"{clue}:", draw.choice([word for word in MEANINGS if clue in MEANINGS[word]]))


def _game(draw: random.Random) -> list[dict[str, Any]]:
    """A clue, and a guess that does not heed it."""
    table = deal(draw)
    clue, guess = draw.choice(legal_clues(table)), draw.choice(table.words)
    return [_turn(SPYMASTER, show_all(table), clue), _turn(GUESSER, show_words(table, clue), guess)]


def _turn(system: str, shown: str, said: str) -> dict[str, Any]:
    roles = (("system", system), ("user", shown), ("assistant", said))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}
