"""A puzzle of deduction: who did it, when, where and with what. A generator, and a solver that proves its one solution.

At every hour each person is in some room, and every tool lies in some room. Somebody did it at some hour, alone in a
room, with a tool that lay there. Clues tell where somebody was at an hour, that two were together, where a tool lay,
and what the solution is not. All that the clues leave open may be any way.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PEOPLE = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo")
HOURS = ("1", "2", "3", "4", "5", "6", "7", "8")
ROOMS = ("kitchen", "library", "cellar", "garden", "attic", "study", "garage", "hall")
TOOLS = ("rope", "hammer", "candle", "poison", "wrench", "razor", "brick", "spade")
PARTS = ("who", "when", "where", "what")


class Size(NamedTuple):
    """How many people, hours, rooms and tools there are; 2 to 8 of each."""

    people: int
    hours: int
    rooms: int
    tools: int

    @property
    def values(self) -> tuple[Sequence[str], ...]:
        """The values of each of PARTS."""
        return PEOPLE[: self.people], HOURS[: self.hours], ROOMS[: self.rooms], TOOLS[: self.tools]


class Clue(NamedTuple):
    """What is known, by kind.

    at        (person, hour, room)      together  (person, person, hour)      lies  (tool, room)
    not       (part, value): the solution's who, when, where or what is another
    """

    kind: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.kind == "not":
            part, value = self.words
            return {
                "who": f"It was not {value}.",
                "when": f"It was not at {value}.",
                "where": f"It was not in the {value}.",
                "what": f"It was not the {value}.",
            }[part]
        form = {"at": "At {1} {0} was in the {2}.", "together": "At {2} {0} and {1} were together."}
        return (form | {"lies": "The {0} lay in the {1}."})[self.kind].format(*self.words)


Solution = tuple[str, str, str, str]  # who, when, where, what


def solve(size: Size, clues: Iterable[Clue]) -> list[Solution]:
    """Every solution that some world allows in which all the clues are true; [] if they contradict each other.

    People who were together at an hour share a place. A place is a room that a clue tells, or open. Somebody can have
    done it in a room if their place is that room or open, and nobody else's place is the same or that room.
    """
    clues = list(clues)
    place = {(person, hour): {(person, hour)} for person in size.values[0] for hour in size.values[1]}
    for clue in clues:
        if clue.kind == "together":
            first, second, hour = clue.words
            joined = place[first, hour] | place[second, hour]
            place |= {member: joined for member in joined}
    known: dict[tuple[str, str], str] = {}  # (person, hour) -> room
    lies: dict[str, str] = {}  # tool -> room
    for clue in clues:
        if clue.kind == "at":
            person, hour, room = clue.words
            for member in place[person, hour]:
                if known.setdefault(member, room) != room:
                    return []
        if clue.kind == "lies" and lies.setdefault(*clue.words) != clue.words[1]:
            return []
    ruled_out = {clue.words for clue in clues if clue.kind == "not"}
    people, hours, rooms, tools = (
        [value for value in values if (part, value) not in ruled_out]
        for part, values in zip(PARTS, size.values, strict=True)
    )
    solutions = []
    for who, when in itertools.product(people, hours):
        occupied = {known.get((other, when)) for other in size.values[0] if other != who}
        for where in rooms if place[who, when] == {(who, when)} else ():
            if known.get((who, when), where) == where and where not in occupied:
                solutions += [(who, when, where, what) for what in tools if lies.get(what, where) == where]
    return solutions


class Puzzle(NamedTuple):
    clues: list[Clue]
    solution: Solution

    @property
    def text(self) -> str:
        return "\n".join(clue.text for clue in self.clues)


def make_puzzle(seed: str, size: Size) -> Puzzle:
    """The puzzle of a seed. Its clues have one solution, and without any one of them they have more."""
    draw = random.Random(seed)
    solution, clues = _true_clues(draw, size)
    draw.shuffle(clues)
    kept = clues
    for clue in clues:
        fewer = [other for other in kept if other != clue]
        if len(solve(size, fewer)) == 1:
            kept = fewer
    assert solve(size, kept) == [solution], (seed, kept)
    return Puzzle(kept, solution)


def _true_clues(draw: random.Random, size: Size) -> tuple[Solution, list[Clue]]:
    """A world, drawn: its solution, and every clue that is true in it."""
    people, hours, rooms, tools = size.values
    who, when, where, what = solution = tuple(map(draw.choice, size.values))
    clues = []
    for hour in hours:
        at = {person: draw.choice(rooms) for person in people}
        if hour == when:
            elsewhere = [room for room in rooms if room != where]
            at = {person: draw.choice(elsewhere) for person in people} | {who: where}
        clues += [Clue("at", (person, hour, room)) for person, room in at.items()]
        pairs = itertools.combinations(people, 2)
        clues += [Clue("together", (one, two, hour)) for one, two in pairs if at[one] == at[two]]
    lies = {tool: draw.choice(rooms) for tool in tools} | {what: where}
    clues += [Clue("lies", pair) for pair in lies.items()]
    for part, values, truth in zip(PARTS, size.values, solution, strict=True):
        clues += [Clue("not", (part, value)) for value in values if value != truth]
    return solution, clues


def score(answer: str, solution: Sequence[str]) -> float:
    """The share of PARTS that the answer's last line has right, in this order; 0 if it is not four words."""
    lines = answer.strip().splitlines() or [""]
    said = "".join(letter if letter.isalnum() else " " for letter in lines[-1].casefold()).split()
    if len(said) != len(PARTS):
        return 0.0
    return sum(word == truth.casefold() for word, truth in zip(said, solution, strict=True)) / len(PARTS)
