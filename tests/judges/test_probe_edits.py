"""Edits change only words, for any attempt."""

import copy
import json
import random
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.judges.probe_edits import FILLER, NAMES, PROBES, each_text, mark_up, rename, without_thoughts
from art_cli.runs.trajectory import Json, Trajectory
from tests.support.judges.ruler_cases import SYSTEM, TASK, attempt, hostile_group

CALL: Json = {
    "id": "c1",
    "type": "function",
    "function": {"name": "book", "arguments": '{"for": "Anna", "to": "Rome"}'},
}


def booked(index: int, *, result: str, answer: str = "Booked for Anna. It costs 80.", **fields: Any) -> Trajectory:
    messages = [
        SYSTEM,
        TASK,
        {"role": "assistant", "content": None, "reasoning_content": "Anna wants Rome.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "book", "content": result},
        {"role": "assistant", "content": f"<think>Done.</think>{answer}"},
    ]
    return attempt(index, messages, **fields)


def edited(probe: str, one: Trajectory, *others: Trajectory) -> Trajectory:
    found = PROBES[probe].edit(one, others)
    assert found is not None
    return found


def last(trajectory: Trajectory) -> Any:
    return trajectory.messages[-1]["content"]


def shape(trajectory: Trajectory) -> Any:
    """Everything preserved by edits: ids, roles, calls without arguments, number of messages."""

    def of(message: Json) -> Any:
        calls = message.get("tool_calls") or []
        named = [(call["id"], call["function"]["name"]) for call in calls]
        return message["role"], message.get("tool_call_id"), message.get("name"), named

    plain = msgspec.to_builtins(trajectory)
    return {key: plain[key] for key in plain if key not in ("messages", "branches")}, list(map(of, trajectory.messages))


@pytest.mark.parametrize("probe", PROBES)
def test_an_edit_keeps_roles_ids_and_calls_and_touches_no_other_attempt(probe: str) -> None:
    one, other = booked(0, result="80 euros", returned_reward=0.5), booked(1, result="90 euros")
    before = copy.deepcopy((one, other))
    changed = edited(probe, one, other)
    assert (one, other) == before and changed != one and shape(changed) == shape(one)
    for message in changed.messages:
        for call in message.get("tool_calls") or []:
            assert json.loads(call["function"]["arguments"]).keys() == {"for", "to"}


def test_what_is_added_stands_at_the_end_of_the_last_reply() -> None:
    one = booked(7, result="80")
    assert last(edited("padding", one)) == f"{last(one)}\n\n{FILLER}"
    assert last(edited("verdict", one)).startswith(f"{last(one)}\n\n") and "g-7" in last(edited("verdict", one))
    parts = [{"type": "text", "text": "Booked."}]
    listed = last(edited("praise", attempt(0, [TASK, {"role": "assistant", "content": parts}])))
    assert listed[0] == parts[0] and listed[1]["type"] == "text"
    for probe in ("padding", "praise", "verdict", "formatting", "empty"):
        assert edited(probe, one).messages[:-1] == one.messages[:-1]


@given(st.text(alphabet="ab. !\n?c", max_size=60))
def test_markdown_has_the_same_words_in_the_same_order(text: str) -> None:
    assert re.findall(r"\w+", mark_up(text)) == re.findall(r"\w+", text)


@pytest.mark.parametrize("text", ['{"answer": 4}', "```\nx = 1\n```", "", "<answer>4</answer>", "# Plan\n- a"])
def test_code_json_and_markdown_are_not_marked_up(text: str) -> None:
    assert mark_up(text) == text


def test_reasoning_is_stripped_in_all_its_forms() -> None:
    texts = {
        "<think>a</think>b": "b",
        "a</think>\n\nb": "b",  # the opening tag stood in the prompt
        "x <think>a</think>b": "x b",
        "<think>a</think>b<think>c</think> d": "bd",
        "a": "a",
        "<think>never closed": "<think>never closed",
    }
    assert {text: without_thoughts(text) for text in texts} == texts
    one = booked(0, result="80", branches=[[{"role": "assistant", "reasoning": "b", "content": "c"}]])
    changed = edited("reasoning", one)
    assert "reasoning_content" not in changed.messages[2] and changed.messages[2]["tool_calls"] == [CALL]
    assert last(changed) == "Booked for Anna. It costs 80."
    assert changed.branches == [[{"role": "assistant", "content": "c"}]]


def test_results_come_from_another_attempt_that_has_others() -> None:
    one, same, other = (booked(index, result=result) for index, result in enumerate(("80", "80", "90")))
    changed = edited("tools", one, same, other)
    assert [message for message in changed.messages if message["role"] == "tool"] == [
        {"role": "tool", "tool_call_id": "c1", "name": "book", "content": "90"}
    ]
    assert PROBES["tools"].edit(one, [same]) is None and PROBES["tools"].edit(attempt(3, [TASK]), [one]) is None


def test_names_change_everywhere_alike_and_only_whole_words() -> None:
    changed = edited("names", booked(0, result="for Anna", answer="Anna, by GPT-4o. Annabel."))
    assert last(changed) == "<think>Done.</think>Fatima, by Llama-4o. Annabel."
    assert "Fatima" in changed.messages[3]["content"] and "Fatima" in changed.messages[2]["reasoning_content"]
    assert json.loads(changed.messages[2]["tool_calls"][0]["function"]["arguments"])["for"] == "Fatima"
    assert not set(NAMES) & set(NAMES.values()) and rename("Anna\nBob") == "Fatima\nHiroshi"


def test_images_and_names_of_tools_are_no_texts() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:Anna"}}], "name": "Anna"}
    assert each_text(image, rename) == image


@pytest.mark.parametrize("messages", [[], [TASK], [{"role": "assistant", "content": ""}]])
@pytest.mark.parametrize("probe", ["formatting", "reasoning", "tools", "empty", "names"])
def test_where_there_is_nothing_to_change_there_is_no_edit(probe: str, messages: list[Json]) -> None:
    assert PROBES[probe].edit(attempt(0, messages), [attempt(1, messages)]) is None


@pytest.mark.parametrize("seed", range(60))
def test_hostile_attempts_are_edited_or_left_alone(seed: int) -> None:
    group = hostile_group(random.Random(seed))
    before = copy.deepcopy(group)
    for probe in PROBES.values():
        changed = probe.edit(group[0], group[1:])
        if changed is not None:
            assert [each.get("role") for each in changed.messages] == [each.get("role") for each in group[0].messages]
    assert group == before


def test_texts_made_to_be_slow_are_not() -> None:
    text = "<think>" * 20_000 + "</think>" * 20_000 + "." * 50_000 + " " * 50_000 + "Anna" * 20_000
    one = attempt(0, [{"role": "assistant", "content": text}])
    for probe in PROBES.values():
        probe.edit(one, [one])
