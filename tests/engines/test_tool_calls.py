"""Chat requests as tokens and sampled text as messages: templates, tool calls, thinking, stop strings, UTF-8."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import token_bytes, token_text
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt, render
from art_cli.engines.embedded.reply_text import Detokenizer, StopWatch, Vocabulary
from tests.support.models.tiny import CHAT_TEMPLATE, tiny_tokenizer

Json = dict[str, Any]

VOCABULARY = Vocabulary(tiny_tokenizer())
SPECIAL = re.compile("|".join(map(re.escape, VOCABULARY.tokenizer.all_special_tokens)))
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]
CALL = '<tool_call>\n{"name": "move", "arguments": {"to": "é4", "n": [1, 2]}}\n</tool_call>'


def request(messages: list[Json], **extra: Any) -> Request:
    return Request(model="m", sampling=Sampling(), messages=messages, **extra)


def encode(text: str) -> list[int]:
    ids: list[int] = VOCABULARY.tokenizer.encode(text, add_special_tokens=False)
    return ids


def parse(text: str, *, pieces: list[int] | None = None, **how: Any) -> Json:
    """Parses a text, pushed in pieces ending at these offsets; call ids are removed."""
    parser = MessageParser(Prompt([], **{"has_tools": True, "has_thinking": True, **how}))
    ends = [*sorted(set(pieces or [])), len(text)]
    deltas: list[Json] = []
    start = 0
    for end in ends:
        deltas += parser.push(text[start:end])
        start = end
    deltas += parser.flush()
    message = parser.message
    assert joined(deltas) == {name: value for name, value in message.items() if value and name != "role"}
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
        assert call.pop("type") == "function"
    return message


def joined(deltas: list[Json]) -> Json:
    """Joins streamed deltas like a client."""
    whole: Json = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value:
                    assert call["index"] == len(whole.setdefault("tool_calls", []))
                    whole["tool_calls"].append({key: part for key, part in call.items() if key != "index"})
            else:
                whole[name] = whole.get(name, "") + value
    return whole


def call(name: str, arguments: str) -> Json:
    return {"function": {"name": name, "arguments": arguments}}


# --- parsing ----------------------------------------------------------------------------------------------------------


def test_calls_and_the_text_before_them() -> None:
    """Arguments equal the sampled text; line breaks before calls belong to the template."""
    look = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert parse(f"I go.\n\n{CALL}\n{look}") == {
        "role": "assistant",
        "content": "I go.\n",
        "tool_calls": [call("move", '{"to": "é4", "n": [1, 2]}'), call("look", "{}")],
    }
    assert parse(CALL)["content"] is None


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>["name"]</tool_call>',
        '<tool_call>{"name": "f", "argu',
        "a < b <tool",
        "</tool_call> alone",
        "  spaces and\n\nlines  \n",
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse(text) == {"role": "assistant", "content": text}


def test_a_client_that_wants_one_call_gets_the_first() -> None:
    text = f"so {CALL}{CALL.replace('move', 'look')} and {CALL}"
    assert [each["function"]["name"] for each in parse(text)["tool_calls"]] == ["move", "look", "move"]
    first = parse(text, has_one_call=True)
    assert [each["function"]["name"] for each in first["tool_calls"]] == ["move"]
    question: list[Json] = [{"role": "user", "content": "go"}]
    assert render(VOCABULARY, request(question, tools=TOOLS, calls_in_parallel=False)).has_one_call
    assert not render(VOCABULARY, request(question, tools=TOOLS)).has_one_call


def test_a_template_that_takes_one_call_names_the_setting() -> None:
    """As Llama's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.tool_calls and message.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endfor %}"
    )
    calls = [{"id": str(n), "type": "function", "function": {"name": "move", "arguments": "{}"}} for n in range(2)]
    for num in (2, 1):
        asked = request([{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": calls[:num]}])
        if num == 1:
            render(Vocabulary(tokenizer), asked)
            continue
        with pytest.raises(ChatError, match="single tool-calls at once!; with parallel_tool_calls=false"):
            render(Vocabulary(tokenizer), asked)


def test_a_call_without_its_end_counts_when_its_json_is_whole() -> None:
    assert parse('<tool_call>\n{"name": "look", "arguments": {}}')["tool_calls"] == [call("look", "{}")]


def test_without_tools_the_tags_are_text() -> None:
    assert parse(CALL, has_tools=False) == {"role": "assistant", "content": CALL}


def test_a_broken_call_does_not_hide_a_good_one() -> None:
    message = parse(f"<tool_call>oops</tool_call>\n{CALL}")
    assert message["content"] == "<tool_call>oops</tool_call>"
    assert len(message["tool_calls"]) == 1


def test_thinking_is_kept_apart() -> None:
    text = f"<think>\nfirst this\n\nthen that\n</think>\n\nHello\n{CALL}"
    message = parse(text)
    assert message["reasoning_content"] == "first this\n\nthen that"
    assert message["content"] == "Hello"
    assert len(message["tool_calls"]) == 1
    assert parse("rest of a thought\n</think>\n\nHello", opening="<think>")["reasoning_content"] == "rest of a thought"
    assert parse(text, has_thinking=False)["content"] == text.removesuffix("\n" + CALL)
    assert parse("no <think>x</think>") == {"role": "assistant", "content": "no <think>x</think>"}


fragments = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "é", "<", "</t", CALL, '{"name": "f"}',
         '{"name": "f", "arguments": {"a": "</tool_call"}}', "<tool_ca", "日本"]
    ),
    max_size=12,
)  # fmt: skip


@pytest.mark.slow
@given(fragments, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_a_message_is_the_same_however_its_text_is_cut_up(
    parts: list[str], cuts: list[int], has_tools: bool, has_thinking: bool
) -> None:
    text = "".join(parts)
    how = {"has_tools": has_tools, "has_thinking": has_thinking}
    whole = parse(text, **how)
    assert parse(text, pieces=[cut for cut in cuts if cut < len(text)], **how) == whole
    assert parse(text, pieces=list(range(len(text))), **how) == whole


# --- prompts ----------------------------------------------------------------------------------------------------------


def next_prompt(messages: list[Json], sampled: str, following: list[Json], **extra: Any) -> tuple[list[int], list[int]]:
    """(tokens of a turn, the prompt of the next one) when the model sampled that text and then its stop token."""
    prompt = render(VOCABULARY, request(messages, **extra))
    parser = MessageParser(prompt)
    parser.push(sampled)
    parser.flush()
    turn = prompt.ids + encode(sampled + "<|im_end|>")
    return turn, render(VOCABULARY, request([*messages, parser.message, *following], **extra)).ids


@pytest.mark.parametrize(
    "sampled",
    ["plain", "  odd  spacing \n", "", "日本語 — é", CALL, f"Let me see.\n{CALL}", f"{CALL}\n{CALL}",
     '<tool_call>\n{"name": "move", "arguments": {"a":1,  "b" : "\\u00e9"}}\n</tool_call>'],
)  # fmt: skip
def test_the_next_prompt_goes_on_from_the_tokens_sampled(sampled: str) -> None:
    user = [{"role": "user", "content": "go"}]
    following = [{"role": "tool", "tool_call_id": "x", "content": "done"}, {"role": "user", "content": "and?"}]
    turn, prompt = next_prompt(user, sampled, following, tools=TOOLS)
    assert prompt[: len(turn)] == turn


def test_a_sampled_marker_that_is_no_call_comes_back_as_text() -> None:
    """So that turn branches. A policy spelling the marker would sample its letters."""
    user, following = [{"role": "user", "content": "go"}], [{"role": "user", "content": "and?"}]
    turn, prompt = next_prompt(user, "<tool_call>no json", following, tools=TOOLS)
    place = len(turn) - len(encode("<tool_call>no json<|im_end|>"))
    assert prompt[: place + 11] == turn[:place] + encode("<") + encode("tool_call>")


def test_arguments_are_given_to_the_template_as_it_expects_them() -> None:
    """Arguments are an object for templates with `arguments | tojson` only, and text for those testing for strings."""
    tokenizer = tiny_tokenizer()
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", **call("f", '{"a":1}')}],
    }
    text = VOCABULARY.decode(render(Vocabulary(tokenizer), request([message])).ids)
    assert '"arguments": {"a":1}}' in text
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a + 41 }}{% endfor %}"
    assert VOCABULARY.decode(render(Vocabulary(tokenizer), request([message])).ids) == "42"


def test_content_may_be_parts_or_null_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "rules"}, {"role": "user", "content": "one\ntwo"}]
    assert render(VOCABULARY, request(messages)).ids == render(VOCABULARY, request(plain)).ids


def test_an_empty_list_of_calls_is_no_call() -> None:
    """Templates ask whether there is a list: Llama's would refuse an empty one, DeepSeek's would drop the text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if 'tool_calls' not in m else 'calls' }}{% endfor %}"
    prompt = render(Vocabulary(tokenizer), request([{"role": "assistant", "content": "four", "tool_calls": []}]))
    assert VOCABULARY.decode(prompt.ids) == "four"


def test_tools_are_shown_unless_the_choice_is_none() -> None:
    user = [{"role": "user", "content": "go"}]
    bare = render(VOCABULARY, request(user)).ids
    assert render(VOCABULARY, request(user, tools=TOOLS, tool_choice="none")).ids == bare
    assert render(VOCABULARY, request(user, tools=TOOLS)).ids != bare


def test_a_forced_call_begins_in_the_prompt() -> None:
    user = [{"role": "user", "content": "go"}]
    named = {"type": "function", "function": {"name": "look"}}
    for choice, rest in (("required", 'look", "arguments": {}}\n</tool_call>'), (named, "{}}\n</tool_call>")):
        prompt = render(VOCABULARY, request(user, tools=TOOLS, tool_choice=choice))
        parser = MessageParser(prompt)
        parser.push(rest)
        parser.flush()
        assert [made["function"] for made in parser.message["tool_calls"]] == [{"name": "look", "arguments": "{}"}]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (request([{"role": "assistant", "content": "", "tool_calls": [call("f", "{")]}]), "not JSON"),
    ],
)
def test_what_cannot_be_done_is_refused(bad: Request, word: str) -> None:
    with pytest.raises(ChatError, match=word) as refusal:
        render(VOCABULARY, bad)
    assert refusal.value.status == 400


def test_an_error_of_the_template_is_the_clients_error() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatError, match="roles must alternate") as refusal:
        render(Vocabulary(tokenizer), request([{"role": "user", "content": "x"}]))
    assert refusal.value.status == 400


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text(max_size=20).filter(lambda text: not SPECIAL.search(text)), st.lists(st.integers(0, 80), max_size=6))
def test_no_piece_of_text_ends_inside_a_character(text: str, cuts: list[int]) -> None:
    """The tokens are single bytes: a character beyond ASCII takes two to four of them. Special tokens are no text."""
    ids = encode(text)
    watch = Detokenizer(VOCABULARY, encode("before"))
    ends = [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    pieces = [watch.push(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    pieces.append(watch.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    watch = Detokenizer(VOCABULARY)
    assert watch.push(encode("aé")[:2]) == ""
    assert watch.flush() == "a\ufffd"


def test_special_tokens_are_no_text_and_tool_tags_are() -> None:
    assert VOCABULARY.decode(encode("<|im_start|>a<tool_call>b<|im_end|>")) == "a<tool_call>b"


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_text_is_cut_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    """Pushed in pieces: the shown text ends at the earliest complete stop string."""
    watch = StopWatch(stops)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = ""
    for start, end in zip([0, *ends], ends, strict=False):
        shown += watch.push(text[start:end])
        assert not any(stop in shown for stop in stops)
    shown += watch.flush()
    found = [text.find(stop) for stop in stops if stop in text]
    assert (watch.found is not None) == bool(found)
    if not found:
        assert (shown, watch.found) == (text, None)
    else:
        assert watch.found in stops and text.startswith(shown + watch.found)


@pytest.mark.parametrize("thinks", [None, True, False])
def test_a_wish_to_think_is_set_where_the_template_reads_it(thinks: bool | None) -> None:
    """Unread wishes are ignored, and client variables override wishes."""
    asked = request([{"role": "user", "content": "hi"}], thinks=thinks)
    tokenizer = tiny_tokenizer()
    plain = Vocabulary(tokenizer)
    tokenizer.chat_template = "{{ 'default' if enable_thinking is not defined else enable_thinking }}"
    reading = Vocabulary(tokenizer)
    assert reading.decode(render(reading, asked).ids) == ("default" if thinks is None else str(thinks))
    set_by_client = msgspec.structs.replace(asked, template_kwargs={"enable_thinking": "so"})
    assert reading.decode(render(reading, set_by_client).ids) == "so"
    tokenizer.chat_template = CHAT_TEMPLATE
    assert render(plain, asked).ids == render(plain, request([{"role": "user", "content": "hi"}])).ids


def test_the_vocabulary_names_each_token() -> None:
    names = [VOCABULARY.text_of(id) for id in encode("a<|im_end|>é")]
    assert list(map(token_text, names)) == ["a", "", "\ufffd", "\ufffd"]
    assert list(map(token_bytes, names)) == [b"a", b"", b"\xc3", b"\xa9"]
