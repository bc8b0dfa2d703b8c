"""The tasks of the learning benchmark: held-out questions, chances of the warm-up, a game that can be won."""

from importlib import import_module
from typing import Any

import pytest

from benchmarks.shared.paths import ROOT


@pytest.fixture
def reasoning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the tasks. It imports libraries that take a second, which no other file's tests need."""
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("textarena")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "learning" / "tasks")
    return import_module("reasoning")


@pytest.mark.parametrize("name", ["sorting", "filtering"])
def test_nothing_that_is_asked_in_the_evaluation_is_trained_on(reasoning: Any, name: str) -> None:
    train = list(getattr(reasoning, f"{name}_train")())
    held_out = {scenario["asked"] for scenario in getattr(reasoning, f"{name}_eval")()}
    assert not held_out & {scenario["asked"] for scenario in train}
    assert len(train) > 3000
    assert all(reasoning.score(scenario, scenario["entry"]["answer"]) == 1.0 for scenario in train[:100])
    assert all(
        reasoning.score(scenario, "[]") == 0.0 or scenario["entry"]["answer"] == "[]" for scenario in train[:100]
    )


@pytest.mark.parametrize("name", ["sorting", "filtering"])
def test_a_third_of_the_warm_up_is_right_and_the_rest_by_chance(reasoning: Any, name: str) -> None:
    """Any order of three digits is right once in 6, any selection once in 8; with a third right besides: 0.44, 0.42."""
    demos = getattr(reasoning, f"{name}_demos")()
    asked = list(reasoning.demo_scenarios(name))
    said = [demo["messages"][1]["content"] for demo in demos]
    right = sum(reasoning.score(scenario, answer) for scenario, answer in zip(asked, said, strict=True)) / len(said)
    assert 0.37 < right < 0.5
