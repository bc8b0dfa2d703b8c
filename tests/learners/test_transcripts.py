"""Transcripts: the rows of other tools' data files, and that a demonstration is rendered as sampling renders it."""

import json
from pathlib import Path
from typing import Any

import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.template_messages import for_template
from art_cli.engines.embedded.chat_prompts import render
from art_cli.engines.embedded.reply_text import Vocabulary
from art_cli.learners.sft.examples import demo_samples, load_demos
from art_cli.models.tokenizer import load_tokenizer, one_template
from art_cli.runtime.errors import DataError
from tests.support.models.tiny import tiny_tokenizer

Json = dict[str, Any]
USER, REPLY = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TALK = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] }}"
CALL = "{{ '<tool_call>' + (c.function.arguments | tojson) + '</tool_call>' }}"
CALLS = f"{{% for c in m.tool_calls or [] %}}{CALL}{{% endfor %}}"
DEEP = "[" * 900 + "]" * 900
END = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def load(tmp_path: Path, row: Json) -> Json:
    (tmp_path / "demos.jsonl").write_text(json.dumps(row) + "\n")
    [demo] = load_demos("demos.jsonl", tmp_path)
    return demo


def learned(demo: Json, tokenizer: Any) -> list[tuple[str, str]]:
    """Returns (text, trained text) of each sample."""
    samples = demo_samples(demo, tokenizer, name="demo", max_length=4096)
    return [
        (tokenizer.decode(sample.token_ids), tokenizer.decode([sample.token_ids[at] for at in sample.targets]))
        for sample in samples
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, REPLY]},
        {"messages": [USER, REPLY], "tools": None, "functions": None, "parallel_tool_calls": True},
        {"messages": json.dumps([USER, REPLY])},
        {"prompt": "2 + 2", "completion": "4"},
        {"prompt": [USER], "completion": [REPLY]},
        {"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{**USER, "from": None}, {"from": "assistant", "value": "4", "weight": None}]},
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "4", "audio": None, "name": None}]},
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]},
    ],
)
def test_every_form_of_a_row_is_learned_as_the_same_tokens(row: Json, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert learned(load(tmp_path, row), tokenizer) == learned({"messages": [USER, REPLY]}, tokenizer)


@pytest.mark.parametrize(
    "call",
    [
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"tool_calls": [{"id": None, "function": {"name": "add", "arguments": {"a": 1}}}], "content": None},
        {"tool_calls": [{"name": "add", "arguments": {"a": 1}}], "content": ""},
        {"function_call": {"name": "add", "arguments": '{"a": 1}'}, "tool_calls": None},
    ],
)
def test_a_call_is_learned_alike_in_whichever_form_it_is_written(call: Json, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TALK + CALLS + END
    [(text, trained)] = learned(load(tmp_path, {"messages": [USER, {"role": "assistant", **call}]}), tokenizer)
    assert trained == '<tool_call>{"a": 1}</tool_call><|im_end|>', text


def test_sharegpt_and_json_text_hold_tools_and_their_calls(tmp_path: Path) -> None:
    rows = [
        {"from": "human", "value": "2 + 2"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    demo = load(tmp_path, {"conversations": rows, "system": "Add.", "tools": json.dumps([TOOL])})
    assert demo["tools"] == [TOOL]
    assert [message["role"] for message in demo["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert demo["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}


def test_a_system_prompt_beside_the_messages_is_learned_from_unless_they_have_one(tmp_path: Path) -> None:
    """Bedrock's fine-tuning files keep it there. A dataset may have it in both places, or a column of that name."""
    system = {"role": "system", "content": "Add."}
    for beside, shown in (("Add.", [system]), ([{"type": "text", "text": "Add."}], None), ({"os": "linux"}, [])):
        demo = load(tmp_path, {"system": beside, "messages": [USER, REPLY]})
        kept = [{"role": "system", "content": beside}] if shown is None else shown
        assert demo["messages"] == [*kept, USER, REPLY]
        assert load(tmp_path, {"system": beside, "messages": [system, USER, REPLY]})["messages"][0] == system


def test_a_message_of_weight_0_and_the_replies_of_a_prompt_are_read_and_not_trained(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    shown = [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}]
    weighted = {"messages": [shown[0], {**shown[1], "weight": 0}, shown[2], {**REPLY, "weight": 1}]}
    for row in (weighted, {"prompt": shown, "completion": [REPLY]}):
        [(text, trained)] = learned(load(tmp_path, row), tokenizer)
        assert trained == "4<|im_end|>" and "5<|im_end|>" in text and "weight" not in text


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "2 + 2 = 4"}, 'needs "messages", "prompt" and "completion"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a preference"),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, "each has weight 0"),
        ({"messages": [USER, {**REPLY, "weight": 0.5}]}, "message 2: its weight is neither 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, REPLY]},
            "message 1: a part of type 'image",
        ),
        ({"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]}, "message 2: it has sound"),
        ({"messages": [USER, {"role": "bot", "content": "4"}]}, "message 2: a message without a valid role"),
        ({"messages": [USER, {**REPLY, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "'f' are not a JSON"),
        ({"messages": [USER, REPLY], "tools": "add"}, "'tools' is text that is not JSON"),
        ({"messages": [USER, REPLY], "tools": '[{"name": "\\ud800"}]'}, "'tools' is text that is not JSON"),
        ({"messages": [USER, REPLY], "tools": f'[{{"name": "f", "parameters": {DEEP}}}]'}, "nested more than 64"),
        ({"messages": f'[{{"role": "user", "x": {DEEP}}}, {json.dumps(REPLY)}]'}, "nested more than 64"),
        ({"messages": [USER, {**REPLY, "x": json.loads(DEEP)}]}, "nested more than 64"),
        ({"messages": [USER, REPLY], "functions": ["f"]}, "a tool without a name"),
        *(
            ({"messages": [USER, {**REPLY, "function_call": call}]}, "message 2: its function_call is a ")
            for call in ("none", "auto", "", 0, False, [])
        ),
        ({"messages": [USER, {**REPLY, "function_call": {"name": ""}}]}, "a tool call without a name"),
        *(
            ({"messages": [USER, {**REPLY, "tool_calls": [{"name": "f", "arguments": given}]}]}, "'f' are not a JSON")
            for given in (False, 0, [], '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', "[]")
        ),
        (
            {"messages": [USER, {**REPLY, "tool_calls": [{"name": "f", "arguments": f'{{"a": {DEEP}}}'}]}]},
            "more than 64",
        ),
        ({"conversations": [{"from": "robot", "value": "4"}]}, "\"from\" is 'robot'"),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name_with_its_line(row: Json, named: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"demos.jsonl:1: ") as refused:
        load(tmp_path, row)
    assert named in str(refused.value)


def test_arguments_are_bounded_in_depth() -> None:
    deep = {"function": {"name": "f", "arguments": "[" * 65 + "]" * 65}}
    with pytest.raises(ChatError, match="'f' are not JSON"):
        for_template({"role": "assistant", "tool_calls": [deep]})


def test_a_developer_message_and_parts_are_prompted_as_they_are_sampled() -> None:
    """The prompt of a demonstration is the prompt that the engine makes of the same messages."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TALK + END
    asked = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+ 2"}]},
    ]
    sampled = render(Vocabulary(tokenizer), Request(model="m", messages=asked, sampling=Sampling()))
    [sample] = demo_samples({"messages": [*asked, REPLY]}, tokenizer, name="demo", max_length=4096)
    assert list(sample.token_ids[: sample.targets[0]]) == sampled.ids


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_named_templates_are_one_template_that_chooses_as_transformers_does(tools: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {
        "default": f"\n{TALK}{END}",
        "tool_use": f"  {{{{ tools | length }}}}{TALK}{END}\n",
        "rag": "",
    }
    tokenizer.save_pretrained(tmp_path)
    talk = [USER, REPLY, USER]
    wanted = tokenizer.apply_chat_template(talk, tools=tools, tokenize=False, add_generation_prompt=True)
    loaded = load_tokenizer(str(tmp_path))
    assert isinstance(loaded.chat_template, str)
    assert loaded.apply_chat_template(talk, tools=tools, tokenize=False, add_generation_prompt=True) == wanted
    request = Request(model="m", messages=talk, tools=tools or [], sampling=Sampling())
    assert loaded.decode(render(Vocabulary(loaded), request).ids) == wanted


def test_a_byte_order_mark_is_no_part_of_a_template() -> None:
    assert one_template("\ufeffa") == "a" and one_template(None) is None
    assert one_template({"default": "\ufeffa"}) == "a"
