"""The rules of a small Codenames, and its words: each has a kind and a colour, and these are the clues.

On the table lie six words: three of ours, two that are nobody's, and the assassin. The spymaster alone knows which is
which, and says a clue; the guesser names one word. A game has at most as many clues as there are words of ours.
"""

import random
from typing import NamedTuple

KINDS = ("animal", "food", "stone", "vehicle")
WORDS_BY_COLOUR = {
    "red": ("lobster", "tomato", "ruby", "firetruck"),
    "green": ("frog", "lettuce", "emerald", "tractor"),
    "black": ("raven", "caviar", "coal", "hearse"),
}
MEANINGS = {
    word: {kind, colour} for colour, words in WORDS_BY_COLOUR.items() for kind, word in zip(KINDS, words, strict=True)
}
CLUES = (*KINDS, *WORDS_BY_COLOUR)
NUM_OURS, NUM_NEUTRAL = 3, 2


class Table(NamedTuple):
    """What still lies there, in the order in which it was dealt, so that the order tells nothing."""

    words: tuple[str, ...]
    ours: frozenset[str]
    assassin: str

    def without(self, word: str) -> "Table":
        return self._replace(words=tuple(w for w in self.words if w != word), ours=self.ours - {word})


def deal(draw: random.Random) -> Table:
    words = draw.sample(sorted(MEANINGS), NUM_OURS + NUM_NEUTRAL + 1)
    *ours, assassin = draw.sample(words, NUM_OURS + 1)
    return Table(tuple(words), frozenset(ours), assassin)


def legal_clues(table: Table) -> list[str]:
    """Those that are true of at least one of our words."""
    return [clue for clue in CLUES if any(clue in MEANINGS[word] for word in table.ours)]


def show_all(table: Table) -> str:
    """What the spymaster sees: each word that is left in a line, under whose it is."""
    ours = [word for word in table.words if word in table.ours]
    neutral = [word for word in table.words if word not in table.ours and word != table.assassin]
    return "\n".join(["ours:", *ours, "neutral:", *neutral, "assassin:", table.assassin])


def show_words(table: Table, clue: str) -> str:
    """What the guesser sees: the clue, and the words, each in a line."""
    return "\n".join([f"{clue}:", *table.words])
