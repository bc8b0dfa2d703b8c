"""The tasks of the learning benchmark: held-out questions, chances of the warm-up, a game that can be won."""

import itertools
import sys

import pytest

from benchmarks.learning.curves import TASKS
from benchmarks.learning.table import Goal
from benchmarks.shared.paths import ROOT

pytest.importorskip("reasoning_gym")
pytest.importorskip("textarena")
sys.path.insert(0, str(ROOT / "benchmarks" / "learning" / "tasks"))

import guessing  # noqa: E402
import reasoning  # noqa: E402


@pytest.mark.parametrize("name", ["sorting", "filtering"])
def test_nothing_that_is_asked_in_the_evaluation_is_trained_on(name: str) -> None:
    train = list(getattr(reasoning, f"{name}_train")())
    held_out = {scenario["asked"] for scenario in getattr(reasoning, f"{name}_eval")()}
    assert not held_out & {scenario["asked"] for scenario in train}
    assert len(train) > 3000
    assert all(reasoning.score(scenario, scenario["entry"]["answer"]) == 1.0 for scenario in train[:100])
    assert all(
        reasoning.score(scenario, "[]") == 0.0 or scenario["entry"]["answer"] == "[]" for scenario in train[:100]
    )


@pytest.mark.parametrize("name", ["sorting", "filtering"])
def test_a_third_of_the_warm_up_is_right_and_the_rest_by_chance(name: str) -> None:
    """Any order of three digits is right once in 6, any selection once in 8; with a third right besides: 0.44, 0.42."""
    demos = getattr(reasoning, f"{name}_demos")()
    asked = list(reasoning.demo_scenarios(name))
    said = [demo["messages"][1]["content"] for demo in demos]
    right = sum(reasoning.score(scenario, answer) for scenario, answer in zip(asked, said, strict=True)) / len(said)
    assert 0.37 < right < 0.5


def test_halving_what_is_left_wins_every_game() -> None:
    for scenario in itertools.islice(guessing.evaluation(), 50):
        game, (low, high), number = guessing.Game(scenario["id"]), guessing.NUMBERS, 0
        while game.said is not None:
            low, high = (number + 1, high) if "higher" in game.said else (low, high)
            low, high = (low, number - 1) if "lower" in game.said else (low, high)
            number = (low + high) // 2
            game.guess(f"[{number}]")
        assert game.is_won


def test_there_are_four_guesses() -> None:
    game, num = guessing.Game("b"), 0
    for number in range(guessing.NUMBERS[0], guessing.NUMBERS[1] + 1):
        if game.said is not None and number != game._env.game_number:
            game.guess(f"[{number}]")
            num += 1
    assert num == guessing.NUM_GUESSES and not game.is_won


@pytest.mark.parametrize("reply", ["junk", "[99]", "[7] [7]"])
def test_a_guess_out_of_form_or_made_before_loses(reply: str) -> None:
    game = guessing.Game("a")
    if "7" in reply:
        game.guess("[7]")
    game.guess(reply)
    assert game.said is None and not game.is_won


def test_every_task_has_a_goal_and_its_files() -> None:
    for task in TASKS.values():
        assert isinstance(task.goal, Goal)
        assert (ROOT / task.config).exists()
        assert (ROOT / task.config.parent / task.demos.partition(":")[0]).exists()
