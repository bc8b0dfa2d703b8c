"""Near duplicates: texts whose words are mostly the same."""

import re
import unicodedata

SAME = 0.8  # Jaccard similarity of words


def words_of(text: str) -> frozenset[str]:
    """Returns the words and numbers, without case, accents and punctuation."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return frozenset(re.findall(r"\w+", "".join(letter for letter in plain if not unicodedata.combining(letter))))


def is_same(one: frozenset[str], other: frozenset[str]) -> bool:
    """Returns True for near duplicates. 7 common words out of 8 and 8 give 7 / 9, which is below 0.8."""
    shorter, longer = sorted((len(one), len(other)))
    if shorter < SAME * longer:
        return False
    common = len(one & other)
    return common >= SAME * (shorter + longer - common)
