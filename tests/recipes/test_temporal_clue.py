"""The puzzle's rules: the solver against all worlds counted out, one solution, partial credit, demonstrations."""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.recipes import load

RECIPE = load("temporal-clue")
Clue, Size = RECIPE.puzzle.Clue, RECIPE.puzzle.Size
World = tuple[dict[tuple[str, str], str], dict[str, str], tuple[str, str, str, str]]


def all_worlds(size: Any) -> Iterator[World]:
    """Who was where at each hour, where each tool lay, and who did it, when, where and with what."""
    people, hours, rooms, tools = size.values
    for rooms_of in itertools.product(rooms, repeat=len(people) * len(hours)):
        at = dict(zip(itertools.product(people, hours), rooms_of, strict=True))
        for rooms_of_tools in itertools.product(rooms, repeat=len(tools)):
            lies = dict(zip(tools, rooms_of_tools, strict=True))
            for who, when, what in itertools.product(people, hours, tools):
                where = at[who, when]
                if lies[what] == where and all(at[other, when] != where for other in people if other != who):
                    yield at, lies, (who, when, where, what)


def is_true(clue: Any, world: World) -> bool:
    at, lies, solution = world
    match clue:
        case ("at", (person, hour, room)):
            return at[person, hour] == room
        case ("together", (one, two, hour)):
            return at[one, hour] == at[two, hour]
        case ("lies", (tool, room)):
            return lies[tool] == room
        case ("not", (part, value)):
            return value != solution[("who", "when", "where", "what").index(part)]
    raise AssertionError(clue)


def all_clues(size: Any) -> list[Any]:
    people, hours, rooms, tools = size.values
    clues = [Clue("at", words) for words in itertools.product(people, hours, rooms)]
    clues += [Clue("together", (*two, hour)) for two in itertools.combinations(people, 2) for hour in hours]
    clues += [Clue("lies", words) for words in itertools.product(tools, rooms)]
    named = zip(("who", "when", "where", "what"), size.values, strict=True)
    return clues + [Clue("not", (part, value)) for part, values in named for value in values]


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (3, 1, 2, 2), (3, 1, 3, 1)])
def test_the_solver_finds_what_counting_all_worlds_finds(shape: tuple[int, int, int, int]) -> None:
    """For 300 sets of clues, true together or not: the solutions of the worlds in which all of them are true."""
    size, draw = Size(*shape), random.Random(0)
    worlds, clues = list(all_worlds(size)), all_clues(size)
    truths = {clue: {place for place, world in enumerate(worlds) if is_true(clue, world)} for clue in clues}
    seen = set()
    for _ in range(300):
        given = draw.sample(clues, draw.randrange(7))
        allowed = set(range(len(worlds))).intersection(*(truths[clue] for clue in given))
        expected = sorted({worlds[place][2] for place in allowed})
        assert sorted(RECIPE.puzzle.solve(size, given)) == expected, given
        seen.add(min(len(expected), 2))
    assert seen == {0, 1, 2}, "no solution, one, and several all came up"


@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (3, 3, 3, 3), (5, 5, 5, 5)])
def test_a_puzzle_has_one_solution_and_needs_each_of_its_clues(shape: tuple[int, int, int, int]) -> None:
    size = Size(*shape)
    for seed in range(20):
        puzzle = RECIPE.puzzle.make_puzzle(f"one-{seed}", size)
        assert puzzle == RECIPE.puzzle.make_puzzle(f"one-{seed}", size)
        assert RECIPE.puzzle.solve(size, puzzle.clues) == [puzzle.solution]
        for clue in puzzle.clues:
            assert len(RECIPE.puzzle.solve(size, [other for other in puzzle.clues if other != clue])) > 1


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Ada 3 kitchen rope", 1.0),
        ("I think so.\n ADA, 3, kitchen: Rope.\n", 1.0),
        ("Boris 3 kitchen rope", 0.75),
        ("rope kitchen 3 Ada", 0.0),
        ("Boris 1 hall brick", 0.0),
        ("Ada at 3 in the kitchen with the rope", 0.0),
        ("Ada 3 kitchen", 0.0),
        ("Ada 3 kitchen rope\n\n.", 0.0),
        ("", 0.0),
    ],
)
def test_each_part_counts_a_quarter_in_its_place(answer: str, share: float) -> None:
    assert RECIPE.puzzle.score(answer, ("Ada", "3", "kitchen", "rope")) == share


def test_demonstrations_are_better_than_chance_and_far_from_right() -> None:
    """Guesses without a clue give (1/3 + 3/2) / 4 = 0.46; somebody who overlooks half of them gets 0.64."""
    draw, size = random.Random(0), RECIPE.scenarios.SMALL
    shares = []
    for number in range(200):
        demo = RECIPE.demos.make_demo(f"demo-{number}", draw)
        solution = RECIPE.puzzle.make_puzzle(f"demo-{number}", size).solution
        shares.append(RECIPE.puzzle.score(demo["messages"][-1]["content"], solution))
    assert sum(shares) / 200 == pytest.approx(0.64, abs=0.06)


@pytest.mark.slow
def test_held_out_puzzles_are_fixed_and_none_with_the_same_clues_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RECIPE.demos, "NUM_SEEDS", 500)
    held_out = list(RECIPE.scenarios.evaluation())
    assert held_out == list(RECIPE.scenarios.evaluation())
    make = functools.partial(RECIPE.puzzle.make_puzzle, size=RECIPE.scenarios.SMALL)
    trained = [scenario["seed"] for scenario in itertools.islice(RECIPE.scenarios.train(), 500)]
    shown = [demo["messages"][1]["content"] for demo in RECIPE.demos.answers()]
    clues = {frozenset(make(scenario["seed"]).text.splitlines()) for scenario in held_out}
    assert not any(frozenset(make(seed).text.splitlines()) in clues for seed in trained)
    assert not any(frozenset(text.splitlines()) in clues for text in shown)
    assert 300 < len(shown) < 500


def test_each_word_of_a_puzzle_and_of_its_answer_is_one_token() -> None:
    """With the space before it; a space before an hour is a token of its own."""
    tokenizer = RECIPE.model.make_tokenizer()
    assert len(tokenizer.encode("Clara 2 library candle")) == 5
    for clue in RECIPE.puzzle.make_puzzle("words", Size(4, 4, 4, 4)).clues:
        num_hours = sum(word.strip(".").isdigit() for word in clue.text.split())
        assert len(tokenizer.encode(clue.text)) == len(clue.text.split()) + num_hours + 1, "and the full stop"
    words = itertools.chain(*(values for values in Size(8, 8, 8, 8).values))
    assert all(len(tokenizer.encode(f" {word}")) == 1 + word.isdigit() for word in words)
