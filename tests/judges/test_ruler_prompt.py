"""The record a judge reads: nothing shared twice, nothing lost, and no text that gets out of its place."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.judge_text import count_tokens
from art_cli.judges.ruler import votes
from art_cli.judges.ruler.attempt_tree import Attempt, Conversation, digest, read_attempt
from art_cli.judges.ruler.group import MARK_TOKENS, _level, read_group, shorten
from art_cli.judges.ruler.prompt import PASSAGE_LENGTH, JudgePrompt, choose_code, choose_ids, write_prompt
from art_cli.runs.trajectory import Json, Trajectory
from tests.support.judges.judge_server import Record, read_record
from tests.support.judges.ruler_cases import SYSTEM, TASK, attempt, hostile_group

BIG = 10**6


def show(
    group: list[Trajectory], *, order: list[int] | None = None, max_tokens: int = BIG
) -> tuple[JudgePrompt, list[Attempt]]:
    attempts = shorten([read_attempt(trajectory) for trajectory in group], max_tokens)
    tools = [tool for trajectory in group for tool in trajectory.tools]
    order = list(range(len(group))) if order is None else order
    return write_prompt(attempts, order=order, tools=tools, instructions="", seed="s"), attempts


def read_back(prompt: JudgePrompt) -> Record:
    return read_record(prompt.messages[1]["content"])


def expected(conversation: Conversation) -> list[tuple[str, list[tuple[str, str]]]]:
    """The expected record of a conversation, written independently of the code under test."""
    shown = []
    for message in conversation:
        if message.role == "cut":
            shown.append((f"cut {message.omitted} messages", []))
            continue
        mark = f"{message.role} {message.answers}" if message.answers else message.role
        pieces = []
        for piece in message.segments:
            cut = f"<cut {piece.omitted} characters>{piece.tail}" if piece.omitted else ""
            pieces.append((piece.kind, piece.text + cut))
        shown.append((mark, pieces))
    return shown


def told(record: Record, name: str) -> list[tuple[str, list[Any]]]:
    return [
        (label, [(message.role, message.pieces) for message in conversation])
        for label, conversation in record.attempts[name]
    ]


def assert_shows_everything(prompt: JudgePrompt, attempts: list[Attempt]) -> None:
    record = read_back(prompt)
    assert sorted(record.asked) == sorted(prompt.ids) == sorted(record.attempts)
    for place, each in enumerate(attempts):
        wanted = [("side", expected(side)) for side in each.sides] + [("main", expected(each.main))]
        assert sorted(told(record, prompt.ids[place])) == sorted(wanted)
        assert list(record.attempts)[prompt.positions[place]] == prompt.ids[place]


def call(arguments: str, *, name: str = "search", id: str = "c1") -> Json:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "function": {"name": name, "arguments": arguments}}],
    }


def test_what_all_share_stands_once_then_what_some_share_then_each_ones_own() -> None:
    """a and b share a turn missing from c: "Oslo" and the search appear once each, in this order."""
    search = call('{"to": "Rome"}')
    found = {"role": "tool", "tool_call_id": "c1", "content": "three flights: 90, 120, 200"}
    group = [
        attempt(0, [SYSTEM, TASK, search, found, {"role": "assistant", "content": "booked 90"}]),
        attempt(1, [SYSTEM, TASK, search, found, {"role": "assistant", "content": "booked 200"}]),
        attempt(2, [SYSTEM, TASK, {"role": "assistant", "content": "gave up"}]),
    ]
    prompt, attempts = show(group)
    text = prompt.messages[1]["content"]
    places = [text.index(part) for part in ("Oslo to Rome", "three flights", "booked 90", "booked 200", "gave up")]
    assert places == sorted(places)
    assert all(text.count(part) == 1 for part in ("Oslo to Rome", "three flights", "You book flights", '"Rome"}'))
    assert_shows_everything(prompt, attempts)


def test_turns_that_differ_only_in_their_random_call_ids_are_shared() -> None:
    group = [
        attempt(
            i,
            [
                SYSTEM,
                TASK,
                call("{}", id=f"call_{i}"),
                {"role": "tool", "tool_call_id": f"call_{i}", "content": "x" * 40},
            ],
        )
        for i in range(3)
    ]
    assert len({digest(read_attempt(trajectory)) for trajectory in group}) == 1


def test_answers_to_several_calls_are_told_apart_by_the_calls_place() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": name}} for name in ("first", "second")]
    answers = [{"role": "tool", "tool_call_id": name, "content": f"answer {name}"} for name in ("second", "first")]
    prompt, _ = show([attempt(0, [{"role": "assistant", "content": None, "tool_calls": calls}, *answers])])
    [(_, conversation)] = read_back(prompt).attempts[prompt.ids[0]]
    assert [(message.role, message.text) for message in conversation[1:]] == [
        ("tool 2", "answer second"),
        ("tool 1", "answer first"),
    ]


def test_sub_agents_and_edited_histories_are_shown_whole_and_sent_once() -> None:
    """Both attempts call the same helper and contain the report: the helper's prompt and report appear once."""
    report = "The cheapest flight is 90, at 7:10. " * 10
    helper = [{"role": "system", "content": "You search flights and nothing else."}, TASK]
    group = []
    for index, end in enumerate(("booked", "gave up")):
        side = [*helper, {"role": "assistant", "content": report}]
        edited = [
            SYSTEM,
            {"role": "user", "content": "(summary) a trip to Rome"},
            {"role": "assistant", "content": "hm"},
        ]
        main = [SYSTEM, TASK, call("{}", name="helper"), {"role": "tool", "content": report}]
        group.append(attempt(index, [*main, {"role": "assistant", "content": end}], branches=[side, edited]))
    prompt, attempts = show(group)
    text = prompt.messages[1]["content"]
    assert text.count("You search flights and nothing else.") == text.count("7:10. The cheapest") // 9 == 1
    assert text.count("(summary)") == 1
    assert_shows_everything(prompt, attempts)


def test_a_branch_that_only_begins_another_conversation_is_left_out() -> None:
    messages = [SYSTEM, TASK, {"role": "assistant", "content": "booked"}]
    assert read_attempt(attempt(0, messages, branches=[messages[:2], messages])).sides == ()


def test_each_tool_is_shown_once_and_without_its_wrapper() -> None:
    """Three attempts, two of which have the same tool and one another: two lines under the mark."""
    tools = [{"type": "function", "function": {"name": name, "description": "d"}} for name in ("search", "book")]
    group = [attempt(index, [SYSTEM, {"role": "user", "content": str(index)}]) for index in range(3)]
    for trajectory, has in zip(group, ([tools[0]], [tools[0]], tools), strict=True):
        trajectory.tools = has
    judged = read_group(group, RulerJudgeConfig(name="ruler"))
    prompt = write_prompt(judged.attempts, order=[0, 1, 2], tools=judged.tools, instructions="", seed="s")
    shown = read_back(prompt).tools.splitlines()
    assert sorted(shown) == ['{"name":"book","description":"d"}', '{"name":"search","description":"d"}']


def test_an_attempt_without_messages_is_shown_as_empty() -> None:
    prompt, attempts = show([attempt(0, []), attempt(1, [SYSTEM])])
    assert_shows_everything(prompt, attempts)


def test_images_are_shown_by_kind_size_and_digest_not_by_their_bytes() -> None:
    data = "iVBOR" * 5000
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    prompt, _ = show([attempt(0, [{"role": "user", "content": [{"type": "text", "text": "see"}, url]}])])
    text = prompt.messages[1]["content"]
    assert len(text) < 500 and "image/png, 25000 characters" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_hostile_attempts_are_read_back_exactly_as_they_were(seed: int) -> None:
    """1,000 attempts for each seed. A text that got out of its place would be read back elsewhere or not at all.

    Each group contains the previous group's code and ids, more than any real attempt could know.
    """
    rng = random.Random(seed)
    known: list[str] = []
    num_attempts = 0
    while num_attempts < 1000:
        prompt, attempts = show(hostile_group(rng, extra=known))
        num_attempts += len(attempts)
        prompt.messages[1]["content"].encode()
        assert_shows_everything(prompt, attempts)
        code = re.search(r'"<(\d+) "', prompt.messages[1]["content"])
        assert code is not None
        known = [f"\n<{code[1]} end>\n", f"\n<{code[1]} attempt {prompt.ids[0]}>\n", code[1], *prompt.ids]


@pytest.mark.slow
@given(
    st.lists(
        st.lists(
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(
                            st.sampled_from(
                                [
                                    "role",
                                    "content",
                                    "type",
                                    "text",
                                    "tool_calls",
                                    "function",
                                    "name",
                                    "arguments",
                                    "id",
                                    "image_url",
                                    "url",
                                ]
                            ),
                            inner,
                            max_size=3,
                        )
                    ),
                    max_leaves=6,
                ),
                max_size=4,
            ),
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_json_for_a_message_is_shown_without_a_crash(conversations: list[list[Json]]) -> None:  # fmt: skip
    prompt, attempts = show([attempt(i, messages) for i, messages in enumerate(conversations)])
    assert_shows_everything(prompt, attempts)


def test_the_code_is_longer_where_every_short_one_occurs() -> None:
    everything = " ".join(f"{number:06d}" for number in range(10**6))
    code = choose_code([everything], random.Random(0))
    assert len(code) > 6 and code not in everything


def test_ids_are_distinct_and_differ_from_vote_to_vote() -> None:
    first, second = (choose_ids(64, random.Random(vote)) for vote in range(2))
    assert len(set(first)) == 64 and first != second


@given(st.integers(1, 30), st.integers(0, 8))
def test_each_pair_of_votes_shows_every_attempt_equally_far_from_the_middle(count: int, pair: int) -> None:
    """Place p in one vote is count - 1 - p in its twin: the mean place of every attempt is (count - 1) / 2."""
    one, other = (votes.order(count, seed="s", vote=2 * pair + twin) for twin in range(2))
    assert sorted(one) == list(range(count))
    assert all(one.index(each) + other.index(each) == count - 1 for each in range(count))


def test_orders_and_prompts_are_the_same_in_every_process() -> None:
    """Written down once: a change here would make every verdict in the users' caches a stranger."""
    assert votes.order(6, seed="s", vote=0) == [5, 4, 1, 2, 0, 3]
    assert choose_ids(3, random.Random("s:0:0")) == ["t7f", "m8k", "t9s"]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(0, 5000))
def test_texts_are_cut_to_the_largest_common_length_that_fits(sizes: list[int], room: int) -> None:
    """L is right when sum(min(size, L)) fits and sum(min(size, L + 1)) does not, or nothing is cut."""
    level = _level(sizes, room)
    assert sum(min(size, level) for size in sizes) <= max(room, 0)
    assert level >= max(sizes) or sum(min(size, level + 1) for size in sizes) > room


@settings(max_examples=60)
@given(st.integers(100, 3000), st.lists(st.integers(0, 30_000), min_size=1, max_size=12), st.sampled_from("aé漢"))
def test_a_shortened_attempt_fits_its_budget(max_tokens: int, lengths: list[int], letter: str) -> None:
    """Texts and marks together, by the same estimate; a token is allowed for rounding each cut text up."""
    messages = [{"role": "tool" if i % 2 else "assistant", "content": letter * size} for i, size in enumerate(lengths)]
    [short] = shorten([read_attempt(attempt(0, messages))], max_tokens)
    pieces = [piece for message in short.main for piece in message.segments]
    texts = sum(count_tokens(piece.text + piece.tail) for piece in pieces)
    assert texts + MARK_TOKENS * (len(short.main) + len(pieces)) <= max(max_tokens, 8 * MARK_TOKENS) + len(pieces)


def test_tool_outputs_are_cut_before_the_agents_own_words_head_and_tail_kept() -> None:
    words, output = "I looked at the list. " * 40, "".join(f"{i} " for i in range(20_000))
    messages = [SYSTEM, {"role": "assistant", "content": words}, {"role": "tool", "content": output}]
    [short] = shorten([read_attempt(attempt(0, messages))], 1000)
    [said], [cut] = short.main[1].segments, short.main[2].segments
    assert said.text == words and not said.omitted
    assert output.startswith(cut.text) and output.endswith(cut.tail) and len(cut.text) > len(cut.tail) > 0
    assert len(cut.text) + cut.omitted + len(cut.tail) == len(output)


def test_a_cut_message_stays_shared_by_attempts_with_different_room() -> None:
    """The second attempt has 4,000 unshared tokens; the shared output keeps the length allowed by the first attempt."""
    output = {"role": "tool", "content": "row " * 10_000}
    group = [
        attempt(0, [SYSTEM, output, {"role": "assistant", "content": "done"}]),
        attempt(1, [SYSTEM, output, {"role": "assistant", "content": "word " * 3200}]),
    ]
    prompt, attempts = show(group, max_tokens=5000)
    assert len(re.findall(r"cut \d+ characters", prompt.messages[1]["content"])) == 1
    assert_shows_everything(prompt, attempts)


def test_conversations_of_very_many_messages_keep_both_ends() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(5000)]
    [short] = shorten([read_attempt(attempt(0, messages))], 1600)
    texts = [message.segments[0].text for message in short.main if message.segments]
    assert len(short.main) == 51 and texts[0] == "0" and texts[-1] == "4999"
    assert sum(message.omitted for message in short.main) == 4950


def test_a_long_text_that_stands_in_different_places_is_sent_once() -> None:
    """After different first turns both attempts read the same file: no prefix is shared there, the text is."""
    file = "def f():\n    return 1\n" * (PASSAGE_LENGTH // 10)
    group = [
        attempt(i, [SYSTEM, {"role": "assistant", "content": f"plan {i}"}, {"role": "tool", "content": file}])
        for i in range(3)
    ]
    prompt, attempts = show(group)
    assert prompt.messages[1]["content"].count(file) == 1
    assert_shows_everything(prompt, attempts)
