"""The questions to train on and those to evaluate on, which are about functions that no training question shows."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from questions import data_directory, read_questions

HELD_OUT = 1 / 3  # share of the families that are held out
MAX_OF_FAMILY = 2  # held-out questions of one family, so that no function weighs much
MAX_OF_CATEGORY = 32  # held-out questions of one category
TURNS = ("simple_python", "irrelevance", "live_simple", "irrelevance", "multiple", "irrelevance")


def train() -> list[dict[str, Any]]:
    return in_turns(split(read_questions(data_directory()))[0])


def evaluation() -> list[dict[str, Any]]:
    return split(read_questions(data_directory()))[1]


def split(questions: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the questions to train on and those held out. A family of questions goes to one side as a whole."""
    training, held_out = [], []
    of_category: Counter[str] = Counter()
    for family in families(list(questions)):
        if not is_held_out(family):
            training += family
            continue
        for question in family[:MAX_OF_FAMILY]:
            of_category[question["category"]] += 1
            if of_category[question["category"]] <= MAX_OF_CATEGORY:
                held_out.append(question)
    return training, held_out


def in_turns(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns questions in the order of play, until a category has no more: every second one calls for a refusal.

    Where refusals are the rarer right answer, calling always is the nearest gain, and soon no attempt refuses.
    """
    shuffled = random.Random(0).sample(questions, len(questions))
    by_category = {category: iter([q for q in shuffled if q["category"] == category]) for category in TURNS}
    return [question for turn in zip(*map(by_category.__getitem__, TURNS), strict=False) for question in turn]


def is_held_out(family: list[dict[str, Any]]) -> bool:
    """Draws by the family's first id. The one large family is trained on."""
    draw = int(hashlib.sha256(family[0]["id"].encode()).hexdigest()[:8], 16) / 2**32
    return draw < HELD_OUT and len(family) < 100


def families(questions: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the questions in sets: two that show a function of the same name are in the same set."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for question in questions:
        first, *others = (function["name"] for function in question["functions"])
        for other in others:
            parents[root(other)] = root(first)
    found: dict[str, list[dict[str, Any]]] = {}
    for question in questions:
        found.setdefault(root(question["functions"][0]["name"]), []).append(question)
    yield from found.values()
