"""The recorder: whatever is called in whatever order, every turn gives back exactly what was sent and sampled."""

import time
from array import array
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.recorder import Recorder, common_prefix
from art_cli.runs.trajectory import prompt, sequence
from tests.support.standins.scripted import ScriptedBackend, encode, render, tool_call

Json = dict[str, Any]

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # three ids: long common prefixes are the rule


def reply_of(prompt_ids: list[int], *sampled: list[int], text: str = "a") -> Reply:
    choices = [
        Choice(index=i, text=text, token_ids=ids, logprobs=[-0.5 - i] * len(ids)) for i, ids in enumerate(sampled)
    ]
    return Reply(id="r", created=0, model="m", choices=choices, prompt_ids=prompt_ids, step=7)


def request_of(*messages: Json, **fields: Any) -> Request:
    return Request(model="m", messages=list(messages), sampling=Sampling(temperature=0.5, top_k=3), **fields)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}


# --- tokens -----------------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    """Calls whose prompts mostly begin somewhere inside what came before: continued, edited, or unrelated."""
    made: list[tuple[list[int], list[list[int]]]] = []
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        start: list[int] = []
        if sequences and draw(st.integers(0, 5)):
            start = draw(st.sampled_from(sequences))
            start = start[: draw(st.integers(0, len(start)))] if draw(st.booleans()) else start
        sent = start + draw(tokens)
        sampled = draw(st.lists(tokens, min_size=1, max_size=3))
        made.append((sent, sampled))
        sequences += [sent + ids for ids in sampled]
    return made


@pytest.mark.slow
@given(calls())
def test_every_turn_reproduces_exactly_what_was_sent_and_sampled(made: list[tuple[list[int], list[list[int]]]]) -> None:
    """Property: prompt() and sequence() of each turn equal the call's ids, and no earlier turn shares more tokens.

    The reference for `kept` compares token by token.
    """
    recorder = Recorder()
    for sent, sampled in made:
        recorder.record(request_of(user("x")), reply_of(sent, *sampled))
    expected = [(sent, ids) for sent, sampled in made for ids in sampled]
    assert len(recorder.turns) == len(expected)
    for index, (sent, ids) in enumerate(expected):
        turn = recorder.turns[index]
        assert prompt(recorder.turns, index) == sent
        assert sequence(recorder.turns, index) == sent + ids
        assert len(turn.logprobs) == len(ids)
        shared = [_common(sent, sequence(recorder.turns, earlier)) for earlier in range(index)]
        assert turn.kept == max(shared, default=0)
        latest = max((place for place, num in enumerate(shared) if num == turn.kept), default=None)
        assert turn.parent == (latest if turn.kept else None)


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_bisection_finds_the_common_prefix(first: list[int], second: list[int]) -> None:
    packed = [array("I", ids).tobytes() for ids in (first, second)]
    assert common_prefix(*packed) == _common(first, second)


def _common(first: list[int], second: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def test_a_turn_carries_how_it_was_sampled() -> None:
    recorder = Recorder()
    recorder.record(request_of(user("x")), reply_of([1, 2], [3], [4]))
    first, second = recorder.turns
    assert (first.parent, first.kept, first.prompt_ids, first.sampled_ids) == (None, 0, [1, 2], [3])
    assert (second.parent, second.kept, second.prompt_ids, second.sampled_ids) == (0, 2, [], [4])
    assert (first.step, first.temperature, first.top_k, first.is_truncated_sampling) == (7, 0.5, 3, True)
    assert (first.logprobs, second.logprobs) == ([-0.5], [-1.5])


def test_branches_are_the_leaves_of_the_token_tree_but_one() -> None:
    """12-3 is continued by 1234-5: no branch. Then 1239-9 leaves it, and 8-8 shares nothing with any: two more."""
    recorder = Recorder()
    assert recorder.metrics() == {
        "num_turns": 0,
        "num_cancelled": 0,
        "num_abandoned": 0,
        "num_branches": 0,
        "num_sampled": 0,
    }
    recorder.record(request_of(user("x")), reply_of([1, 2], [3]))
    recorder.record(request_of(user("x")), reply_of([1, 2, 3, 4], [5]))
    assert recorder.metrics()["num_branches"] == 0
    recorder.record(request_of(user("x")), reply_of([1, 2, 3, 9], [9]))
    recorder.record(request_of(user("x")), reply_of([8], [8]))
    assert recorder.metrics() == {
        "num_turns": 4,
        "num_cancelled": 0,
        "num_abandoned": 0,
        "num_branches": 2,
        "num_sampled": 4,
    }


def test_a_reply_without_tokens_leaves_messages_and_no_turn() -> None:
    recorder = Recorder()
    answer = Choice(index=0, message=assistant("yo"), text="yo")
    recorder.record(request_of(user("hi")), Reply(id="r", created=0, model="m", choices=[answer], prompt_ids=[]))
    assert recorder.turns == []
    assert recorder.messages == [user("hi"), assistant("yo")]


def test_long_conversations_cost_no_python_work_per_token() -> None:
    """30 rollouts of 16 turns, each 250 tokens longer: 30 * 34,000 prompt tokens. A loop takes seconds."""
    sent = [list(range(250 * turn)) + [5] for turn in range(1, 17)]
    begin = time.process_time()
    for _ in range(30):
        recorder = Recorder()
        for ids in sent:
            recorder.record(request_of(user("x")), reply_of(ids, [1, 2, 3]))
    assert time.process_time() - begin < 0.5


# --- messages ---------------------------------------------------------------------------------------------------------


async def converse(recorder: Recorder, backend: ScriptedBackend, *messages: Json, **fields: Any) -> Json:
    request = request_of(*messages, **fields)
    reply = await backend.reply(request)
    recorder.record(request, reply)
    message: Json = reply.choices[0].message or {}
    return message


async def test_a_conversation_that_goes_on_is_one_and_its_tokens_continue() -> None:
    """Clients send replies back as they please: content null or absent, fields added; it stays one conversation."""
    add = {"type": "function", "function": {"name": "add"}}
    answers = iter([tool_call("add", a=1), "done", "bye"])
    recorder, backend = Recorder(), ScriptedBackend(lambda request: next(answers))
    first = await converse(recorder, backend, user("hi"), tools=[add])
    sent_back = {**first, "refusal": None, "annotations": []}
    del sent_back["content"]
    tool = {"role": "tool", "tool_call_id": "call-add", "content": "2"}
    second = await converse(recorder, backend, user("hi"), sent_back, tool, tools=[add])
    parts = {"role": "assistant", "content": [{"type": "text", "text": "done"}]}
    await converse(recorder, backend, user("hi"), sent_back, tool, parts, user("thanks"), tools=[add])
    assert second == assistant("done")
    assert recorder.messages == [user("hi"), sent_back, tool, parts, user("thanks"), assistant("bye")]
    assert recorder.branches == []
    assert recorder.tools == [add]
    assert recorder.metrics()["num_branches"] == 0
    assert sequence(recorder.turns, 0) == encode(f"<user>hi\n<assistant>{render(first)}\n")


async def test_other_conversations_are_kept_whole() -> None:
    """A sub-agent between two turns of the main one; an edited history; the last call's conversation is `messages`."""
    recorder, backend = Recorder(), ScriptedBackend()
    await converse(recorder, backend, user("main"))
    await converse(recorder, backend, user("sub"))
    await converse(recorder, backend, user("main"), assistant("ok"), user("more"))
    assert recorder.messages == [user("main"), assistant("ok"), user("more"), assistant("ok")]
    assert recorder.branches == [[user("sub"), assistant("ok")]]
    await converse(recorder, backend, user("main"), assistant("edited"), user("more"))
    assert recorder.messages[1] == assistant("edited")
    assert len(recorder.branches) == 2


async def test_of_several_choices_the_one_that_is_continued_is_replaced() -> None:
    recorder = Recorder()
    choices = [Choice(index=i, message=assistant(text)) for i, text in enumerate(["left", "right"])]
    recorder.record(request_of(user("x")), Reply(id="r", created=0, model="m", choices=choices, prompt_ids=[]))
    assert recorder.messages == [user("x"), assistant("left")]
    await converse(recorder, ScriptedBackend(), user("x"), assistant("right"), user("y"))
    assert recorder.messages == [user("x"), assistant("right"), user("y"), assistant("ok")]
    assert recorder.branches == [[user("x"), assistant("left")]]


def test_plain_completions_make_a_conversation_too() -> None:
    recorder = Recorder()
    for text, answer in (("2+2=", "4"), ("2+2=4 and 3+3=", "6"), ("other", "a")):
        request = Request(model="m", prompt=text, sampling=Sampling())
        recorder.record(request, reply_of(encode(text), encode(answer), text=answer))
    assert recorder.messages == [user("other"), assistant("a")]
    assert recorder.branches == [[user("2+2="), assistant("4"), user(" and 3+3="), assistant("6")]]


# --- written as sampled -----------------------------------------------------------------------------------------------


def called(id: Any, arguments: str, content: str | None = None) -> Json:
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def recorded(*messages: Json) -> Recorder:
    """Returns a recorder with one reply for each of these messages."""
    recorder = Recorder()
    for message in messages:
        choice = Choice(index=0, message=message, token_ids=[1], logprobs=[-1.0])
        recorder.record(request_of(user("u")), Reply(id="r", created=0, model="m", choices=[choice], prompt_ids=[1]))
    return recorder


def test_a_call_that_comes_back_written_otherwise_is_written_as_it_was_sampled() -> None:
    """Lost space around the text next to a call is restored too; changed text is kept as the client sent it."""
    recorder = recorded(called("one", '{"b":1.0,  "a": 2}', " \n"), called("two", "{}", "I say. "))
    for sent, meant in (
        (called("one", '{"a": 2, "b": 1}'), called("one", '{"b":1.0,  "a": 2}', " \n")),
        (called("two", "{ }", "I say."), called("two", "{}", "I say. ")),
        (called("one", '{"a": 3, "b": 1}', " \n"), None),
        (called("two", "{}", "I said. "), None),
        (called("three", '{"a": 2, "b": 1}', "new"), None),
        (called(None, "{}"), None),
        (assistant("I say."), None),
    ):
        restored = recorder.as_sampled(request_of(user("u"), sent)).messages
        assert restored == [user("u"), sent if meant is None else meant]


def test_a_reply_with_calls_of_an_unknown_kind_is_recorded() -> None:
    """As some endpoints give them: without an id, or with something else than a function."""
    odd: Json = {"role": "assistant", "content": None, "tool_calls": [{"type": "custom"}, {"id": 7, "function": None}]}
    recorder = recorded(odd, called(None, "{}"))
    assert recorder.num_calls == 2
    assert recorder.as_sampled(request_of(user("u"))).messages == [user("u")]


def test_a_long_conversation_is_kept_once() -> None:
    """The data kept for matching retries does not include the history."""
    recorder, messages = Recorder(), [user("begin")]
    found = []
    for number in range(50):
        found.append(recorder.record(request_of(*messages), reply_of([number], [number + 1], text=f"a{number}")))
        messages += [assistant(f"a{number}"), user(f"u{number}")]
    assert sum(len(each.messages) for one in found for each in one.conversations) == len(recorder.messages) == 100
