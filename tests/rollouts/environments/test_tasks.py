"""Tasks written by a model: valid answers, near duplicates, and an even spread."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.cli.scenario_writing import TaskPlan, Tasks, is_same, questions, read_answer, words_of

TOOLS = ["add", "count"]
GOOD = {"task": "Add 1 and 2.", "tools": ["add"], "difficulty": 1}


def answer(*tasks: Any) -> str:
    return json.dumps({"tasks": tasks})


@pytest.mark.parametrize(
    "text",
    [
        answer(GOOD),
        f"Here they are:\n```json\n{answer(GOOD)}\n```\nEnjoy!",
        f"<think>{{ what now }}</think>{answer(GOOD)}",
        answer(GOOD, {**GOOD, "difficulty": 6}, {**GOOD, "difficulty": True}, {**GOOD, "difficulty": "1"}),
        answer({**GOOD, "tools": []}, {**GOOD, "tools": ["sub"]}, {**GOOD, "tools": "add"}, GOOD, 5, None),
        answer({**GOOD, "task": " "}, {**GOOD, "task": "x" * 5000}, {**GOOD, "task": "a\x00b"}, GOOD, {"task": "x"}),
        answer({**GOOD, "task": "  Add 1   and 2. "}),
    ],
)
def test_the_usable_tasks_of_an_answer_are_read_and_no_others(text: str) -> None:
    (task,) = read_answer(text, TOOLS).tasks
    assert (task["task"], task["tools"], task["difficulty"]) == ("Add 1 and 2.", ["add"], 1)


@pytest.mark.parametrize(
    "text", ["", "I cannot help with that.", '{"tasks": [', '{"tasks": {}}', "[1]", "null", "{" * 20_000, '{"a": 1}']
)
def test_an_answer_without_a_list_of_tasks_is_refused(text: str) -> None:
    answer = read_answer(text, TOOLS)
    assert not answer.tasks and answer.problems


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Add 1 and 2!", "add 1, and 2", True),
        ("Café near Zürich", "cafe near zurich", True),
        ("Add 1 and 2", "Add 3 and 4", False),
        ("a b c d e f g h i", "a b c d e f g h i j", True),  # 9 of 10
        ("a b c d e f g h", "a b c d e f g x", False),  # 7 of 9
        ("", "", True),
    ],
)
def test_tasks_with_four_of_five_words_in_common_are_the_same(one: str, other: str, same: bool) -> None:
    assert is_same(words_of(one), words_of(other)) is is_same(words_of(other), words_of(one)) is same


@given(one=st.frozensets(st.integers(0, 12)), other=st.frozensets(st.integers(0, 12)))
def test_sameness_is_the_share_of_the_words_in_common(one: frozenset[Any], other: frozenset[Any]) -> None:
    union = len(one | other)
    assert is_same(one, other) is (union == 0 or len(one & other) / union >= 0.8)


def test_places_are_spread_over_tools_and_difficulties_that_have_few_tasks() -> None:
    """Ten tasks over two tools are five each, one per difficulty; existing tasks count."""
    assert Counter(Tasks(TOOLS).places(10)) == {TaskPlan(tool, level): 1 for tool in TOOLS for level in range(1, 6)}
    tasks = Tasks(TOOLS)
    for number in range(3):
        tasks.keep({"id": str(number), "task": f"t{number}", "tools": ["add"], "difficulty": 1})
    assert [place.tool for place in tasks.places(3)] == ["count"] * 3
    assert TaskPlan("add", 1) not in tasks.places(10)


def test_of_too_many_tools_a_call_shows_those_that_it_is_about() -> None:
    """500 tools of a thousand characters each would exceed the prompt. Existing tasks are truncated too."""
    tools = [{"function": {"name": f"tool{number}", "description": "x" * 1000}} for number in range(500)]
    asked = questions(tools, [TaskPlan("tool7", 1)], Tasks(["tool7"], found=[{"task": "y" * 4000}]).near([]))
    assert '"tool7"' in asked[0]["content"] and '"tool8"' not in asked[0]["content"] and "tool8" in asked[0]["content"]
    assert sum(len(each["content"]) for each in asked) < 12_000
