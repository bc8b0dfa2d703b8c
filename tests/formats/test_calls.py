"""Replies are matched to turns only if unambiguous, never guessed."""

import math

import msgspec

from art_cli.formats.traces.spans import calls_of
from art_cli.runs.trajectory import Json, Turn
from tests.support.records.attempts import attempt


def said(*texts: str) -> list[Json]:
    """Questions and replies in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def turn(num: int, parent: int | None = None) -> Turn:
    return Turn(parent=parent, kept=0, prompt_ids=[1], sampled_ids=[2] * num, logprobs=[-0.5] * num, raw_logprobs=None,
                step=0, temperature=1.0)  # fmt: skip


def test_replies_have_their_turns_tools_their_results_and_the_calls_share_the_time_by_their_tokens() -> None:
    """Of 10 s the first call has (1 + 3) / (1 + 3 + 1 + 2) and the second the rest."""
    first, second = calls_of(attempt())
    assert (first.place, second.place) == (2, 4) and (first.number, second.number) == (0, 1)
    assert (first.num_prompt, second.num_prompt) == (5, 12)
    assert [(tool.name, tool.arguments, tool.result) for tool in first.tools] == [
        ("search", '{"query": "cheese"}', "1 mail of Ann")
    ]
    assert second.tools == []
    assert first.begin == 1_700_000_000.0 and abs(first.end - first.begin - 10 * 4 / 7) < 1e-6
    assert second.begin == first.end and abs(second.end - 1_700_000_010.0) < 1e-6


def test_calls_have_measured_times_within_the_attempt_if_each_has_them() -> None:
    """A file's times may be wrong: they are bounded by the attempt's 10 s."""
    first, second = calls_of(attempt(spans=[(0.5, 2.0), (3.0, math.inf)]))
    assert [each - 1_700_000_000.0 for each in (first.begin, first.end, second.begin, second.end)] == [0.5, 2, 3, 10]
    backward, unknown = calls_of(attempt(spans=[(5.0, 4.0), (math.nan, -1.0)]))
    assert backward.begin == backward.end == 1_700_000_005.0 and unknown.begin == unknown.end == 1_700_000_000.0
    assert calls_of(attempt(spans=[(0.5, 2.0)])) == calls_of(attempt())


def test_examples_in_the_prompt_are_no_calls_and_a_reply_that_nobody_saw_takes_no_turn() -> None:
    conversation = said("example?", "example!", "what?", "this")
    seen, lost = turn(2), msgspec.structs.replace(turn(5), is_abandoned=True)
    (call,) = calls_of(attempt(messages=conversation, turns=[lost, seen]))
    assert call.reply["content"] == "this" and call.turn is seen and call.number == 1


def test_conversations_are_told_apart_by_the_lengths_of_their_paths() -> None:
    """The agent asks a sub-agent twice between its own first and third call."""
    own, sub = said("a", "1", "b", "2", "c", "3"), said("x", "4", "y", "5")
    turns = [turn(1), turn(2), turn(3, parent=1), turn(4, parent=0), turn(5, parent=3)]
    calls = calls_of(attempt(messages=own, branches=[sub], turns=turns))
    assert [(call.reply["content"], call.number) for call in calls] == [
        ("1", 0), ("4", 1), ("5", 2), ("2", 3), ("3", 4)
    ]  # fmt: skip


def test_where_there_is_a_doubt_no_call_has_another_ones_tokens() -> None:
    one, other = said("a", "1"), said("x", "2")
    calls = calls_of(attempt(messages=one, branches=[other], turns=[turn(1), turn(2)]))
    assert [call.reply["content"] for call in calls] == ["2", "1"] and all(call.turn is None for call in calls)
    more_turns = calls_of(attempt(messages=one, turns=[turn(1), turn(2)]))
    assert [call.turn for call in more_turns] == [None]


def test_a_call_that_two_conversations_begin_with_is_one_call() -> None:
    calls = calls_of(attempt(messages=said("a", "1", "b", "2"), branches=[said("a", "1", "c", "3")], turns=[]))
    assert [call.reply["content"] for call in calls] == ["1", "3", "2"]


def test_an_attempt_that_said_nothing_has_no_calls() -> None:
    assert calls_of(attempt(messages=[], turns=[])) == []
