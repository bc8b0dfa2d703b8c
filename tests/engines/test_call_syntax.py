"""Tool calls of model families besides Hermes, read on the embedded engine; each template line is the family's own."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.embedded.call_syntax import GLM, HERMES, LLAMA, MISTRAL, PHI, XML, find_syntax
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt, render
from art_cli.engines.embedded.reply_text import Vocabulary
from tests.support.models.tiny import tiny_tokenizer

Json = dict[str, Any]

MOVE = {"type": "object", "properties": {"to": {"type": "string"}, "n": {"type": "integer"}}}
SCHEMAS = {"move": MOVE}
ARGUMENTS = '{"to": "é4", "n": 7}'

# One call of move(to="é4", n=7) as each family writes it.
TEXTS = {
    "hermes": (HERMES, '<tool_call>\n{"name": "move", "arguments": ' + ARGUMENTS + "}\n</tool_call>"),
    "xml": (
        XML,
        "<tool_call>\n<function=move>\n<parameter=to>\né4\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>move\n<arg_key>to</arg_key>\n<arg_value>é4</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>7</arg_value>\n</tool_call>",
    ),
    "mistral list": (MISTRAL, '[TOOL_CALLS][{"name": "move", "arguments": ' + ARGUMENTS + "}]"),
    "mistral args": (MISTRAL, "[TOOL_CALLS]move[ARGS]" + ARGUMENTS),
    "llama": (LLAMA, '{"name": "move", "parameters": ' + ARGUMENTS + "}"),
    "llama tag": (LLAMA, '<|python_tag|>{"name": "move", "parameters": ' + ARGUMENTS + "}"),
    "phi": (PHI, '<|tool_call|>[{"name": "move", "arguments": ' + ARGUMENTS + "}]<|/tool_call|>"),
}
# The line of each family's published chat template that writes a call.
TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    "xml": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "glm": "<arg_key>{{ k }}</arg_key> {{ '\\n<tool_call>' + tc.name }}",
    "mistral": '{{- "[TOOL_CALLS] [" }}{{- \'"parameters": \' }}',
    "llama": "{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    "phi": "{{ '<|tool_call|>' + message['tool_calls'] | tojson + '<|/tool_call|>' }}",
}


def parse(text: str, cuts: list[int], **how: Any) -> Json:
    parser = MessageParser(Prompt([], **{"has_tools": True, "has_thinking": True, "schemas": SCHEMAS, **how}))
    start = 0
    for end in [*sorted({cut for cut in cuts if cut < len(text)}), len(text)]:
        parser.push(text[start:end])
        start = end
    parser.flush()
    return {**parser.message, "tool_calls": [call["function"] for call in parser.message.get("tool_calls", [])]}


@pytest.mark.parametrize("family", TEXTS)
def test_a_call_of_each_family_is_read_with_its_arguments(family: str) -> None:
    syntax, text = TEXTS[family]
    message = parse(text, [], syntax=syntax)
    [call] = message["tool_calls"]
    assert message["content"] is None
    assert call["name"] == "move"
    assert json.loads(call["arguments"]) == {"to": "é4", "n": 7}


@pytest.mark.parametrize("family", ["mistral list", "llama", "llama tag", "phi"])
def test_arguments_written_as_json_stay_the_text_that_was_sampled(family: str) -> None:
    syntax, text = TEXTS[family]
    spaced = text.replace(ARGUMENTS, '{ "to":"é4",  "n" : 7 }')
    [call] = parse(spaced, [], syntax=syntax)["tool_calls"]
    assert call["arguments"] == '{ "to":"é4",  "n" : 7 }'


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "Ab3dEf6h9"}]', "Ab3dEf6h9"),
        ("[TOOL_CALLS]f[CALL_ID]Ab3dEf6h9[ARGS]{}", "Ab3dEf6h9"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "no id"}]', None),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 123456789}]', "123456789"),
        ("[TOOL_CALLS]f[ARGS]{}", None),
    ],
)
def test_a_call_of_mistral_has_the_id_that_was_sampled_or_one_that_its_templates_accept(
    text: str, id: str | None
) -> None:
    parser = MessageParser(Prompt([], has_tools=True, syntax=MISTRAL))
    parser.push(text)
    parser.flush()
    [call] = parser.calls
    assert call["id"] == id or (id is None and len(call["id"]) == 9 and call["id"].isalnum())


def test_several_calls_in_one_reply() -> None:
    one = '{"name": "move", "arguments": {}}'
    assert len(parse(f"[TOOL_CALLS][{one}, {one}]", [], syntax=MISTRAL)["tool_calls"]) == 2
    assert len(parse("[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}", [], syntax=MISTRAL)["tool_calls"]) == 2
    assert len(parse(f"{one}; {one}", [], syntax=LLAMA)["tool_calls"]) == 2


def test_a_value_is_what_its_schema_says() -> None:
    """Strings stay text even if they look like numbers; lacking a schema, valid JSON is parsed."""
    text = "<tool_call><function=f><parameter=s>7</parameter><parameter=x>7</parameter></function></tool_call>"
    schemas = {"f": {"properties": {"s": {"type": "string"}}}}
    [call] = parse(text, [], syntax=XML, schemas=schemas)["tool_calls"]
    assert json.loads(call["arguments"]) == {"s": "7", "x": 7}


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (MISTRAL, "[TOOL_CALLS] nothing that is JSON"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{broken"),
        (LLAMA, '{"answer": 4}'),
        (LLAMA, '{"name": 3, "parameters": {}}'),
        (LLAMA, "{" * 5000),
        (XML, "<tool_call><function=f><parameter=a>1</tool_call>"),
        (GLM, "<tool_call>f <arg_key>a</arg_key></tool_call>"),
        (PHI, '<|tool_call|>[{"name": "f"}, 3]<|/tool_call|>'),
    ],
)
def test_text_that_is_no_call_stays_content(syntax: Any, text: str) -> None:
    message = parse(text, [], syntax=syntax)
    assert message["content"] == text
    assert message["tool_calls"] == []


@given(
    st.sampled_from(sorted(TEXTS)),
    st.lists(st.sampled_from(["<think>", "</think>", "{", "[", "a", "\n", " ", "<", "[TOOL", "é", "<|"]), max_size=4),
    st.lists(st.integers(0, 300), max_size=8),
)
@example("llama", ["<think>", "</think>", " "], [16])
def test_a_message_is_the_same_however_its_text_is_cut_up(family: str, before: list[str], cuts: list[int]) -> None:
    syntax, text = TEXTS[family]
    text = "".join(before) + text
    assert parse(text, cuts, syntax=syntax) == parse(text, [], syntax=syntax)
    assert parse(text, list(range(len(text))), syntax=syntax) == parse(text, [], syntax=syntax)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_template_says_which_syntax_it_is(family: str) -> None:
    assert find_syntax(TEMPLATES[family]).name == family


def test_a_request_is_read_in_the_syntax_of_its_template_and_refuses_to_force_what_it_cannot_hold() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if false %}" + TEMPLATES["xml"] + "{% endif %}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "move", "parameters": MOVE}}]
    asked = {"model": "m", "sampling": Sampling(), "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    parser = MessageParser(render(Vocabulary(tokenizer), Request(**asked)))
    parser.push(TEXTS["xml"][1])
    parser.flush()
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"to": "é4", "n": 7}
    with pytest.raises(ChatError, match="tool_choice"):
        render(Vocabulary(tokenizer), Request(**asked, tool_choice="required"))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": ["string", "null"]}, "10001", "10001"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),  # str | None, as pydantic writes it
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "42", 42),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        (None, "[1, 2]", [1, 2]),
        (7, "é", "é"),
    ],
)
def test_an_argument_has_the_type_that_its_schema_names(schema: Any, text: str, value: Any) -> None:
    schemas = {"move": {"type": "object", "properties": {"to": schema}}}
    written = f"<tool_call>\n<function=move>\n<parameter=to>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = parse(written, [], syntax=XML, schemas=schemas)["tool_calls"]
    assert json.loads(call["arguments"]) == {"to": value}


def test_an_answer_in_json_with_a_field_name_is_no_call() -> None:
    """Llama writes calls without markers; a JSON object counts as a call only if it names a tool."""
    syntax, text = TEXTS["llama"]
    assert parse(text, [], syntax=syntax)["tool_calls"]
    answer = '{"name": "Alice", "age": 30}'
    assert parse(answer, [], syntax=syntax) | {"tool_calls": []} == parse(answer, [5, 9], syntax=syntax)
    assert parse(answer, [], syntax=syntax)["content"] == answer


MARKS = ("<tool_call>", "</tool_call>", "<parameter=to>", "</parameter>", "</function>", "<function=f>", "<arg_value>")
MARKS += ("</arg_value>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>")
# How each family writes a call of move(to=VALUE). xml and glm contain raw values, other syntaxes JSON.
QUOTES = {
    "hermes": '<tool_call>\n{"name": "move", "arguments": {"to": VALUE}}\n</tool_call>',
    "xml": "<tool_call>\n<function=move>\n<parameter=to>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>move\n<arg_key>to</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "mistral list": '[TOOL_CALLS][{"name": "move", "arguments": {"to": VALUE}}]',
    "mistral args": '[TOOL_CALLS]move[ARGS]{"to": VALUE}',
    "llama": '{"name": "move", "parameters": {"to": VALUE}}',
    "llama tag": '<|python_tag|>{"name": "move", "parameters": {"to": VALUE}}',
    "phi": '<|tool_call|>[{"name": "move", "arguments": {"to": VALUE}}]<|/tool_call|>',
}
PLAIN = ("xml", "glm")
# Text that arguments cannot contain, because it looks like the end of the argument.
ENDS = {"xml": ("</parameter><parameter=", "</parameter></function></tool_call>"),
        "glm": ("</arg_value><arg_key>", "</arg_value></tool_call>")}  # fmt: skip


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(QUOTES)),
    st.lists(st.sampled_from([*MARKS, "a", " b ", '"', "\\", "{", "}]", "é"]), min_size=1, max_size=4),
    st.sampled_from([1, 2]),
    st.lists(st.integers(1, 200), max_size=4),
)
def test_marks_that_an_argument_quotes_are_its_text(family: str, parts: list[str], num: int, cuts: list[int]) -> None:
    value = "x" + "".join(parts) + "x"
    if any(end in value for end in ENDS.get(family, ())):
        return
    text = QUOTES[family].replace("VALUE", value if family in PLAIN else json.dumps(value))
    num = num if family in ("hermes", "xml", "glm", "phi") else 1  # other syntaxes write all calls in one text
    calls = parse("\n".join([text] * num), cuts, syntax=TEXTS[family][0])["tool_calls"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"to": value}] * num


DEEP = "[" * 64 + "]" * 64  # with the object around it deeper than a request may be, so it could not come back


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", DEEP])
@pytest.mark.parametrize("family", sorted(set(QUOTES) - {"xml", "glm"}))
def test_a_value_that_no_client_could_send_back_makes_no_call(family: str, number: str) -> None:
    message = parse(QUOTES[family].replace("VALUE", number), [], syntax=TEXTS[family][0])
    assert message["tool_calls"] == [] and number in (message["content"] or "")


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", '"\\ud800"', "[NaN]", DEEP])
@pytest.mark.parametrize("family", PLAIN)
def test_a_value_that_is_not_json_stays_text(family: str, value: str) -> None:
    schemas = {"move": {"properties": {"to": {"type": "number"}}}}
    text = QUOTES[family].replace("VALUE", value)
    [call] = parse(text, [], syntax=TEXTS[family][0], schemas=schemas)["tool_calls"]
    assert json.loads(call["arguments"]) == {"to": value} and call["arguments"].encode()
