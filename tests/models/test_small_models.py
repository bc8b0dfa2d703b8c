"""Small models that recipes build: words and the pieces of calls are one token each, and any text comes back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.engines.embedded.call_syntax import find_syntax
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt
from art_cli.models.builtin_models import TOOLS_TEMPLATE, make_tokenizer


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {argument: {"type": type} for argument, type in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("search", query="string", page="integer"),
    tool("read", id="integer"),
    tool("say", to="string", text="string"),
]
TOOLS += [tool("stop")]
TOKENIZER = make_tokenizer(["who pays for lunch"], tools=TOOLS, splits_spaces=True)


@pytest.mark.parametrize(
    ("name", "arguments", "tokens"),
    [
        ("read", '{"id": 7}', ["7"]),
        ("search", '{"query": "pays lunch", "page": 2}', ["pays", " ", "lunch", '", "page": ', "2"]),
        ("say", '{"to": "who", "text": "lunch"}', ["who", '", "text": "', "lunch"]),
        ("stop", "{}", []),
    ],
)
def test_a_call_is_its_words_and_a_token_for_each_piece_around_them(
    name: str, arguments: str, tokens: list[str]
) -> None:
    """The call as the template writes it is what the parser reads from the tokens, one token at a time."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    shown = [{"role": "user", "content": "who pays"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = TOKENIZER.apply_chat_template(shown, tools=TOOLS, tokenize=False)
    said = text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    pieces = [TOKENIZER.decode([id]) for id in TOKENIZER.encode(said)]
    assert pieces[1:-1] == tokens or (pieces, tokens) == ([said], [])
    parser = MessageParser(Prompt([], has_tools=True, syntax=find_syntax(TOOLS_TEMPLATE)))
    for piece in pieces:
        parser.push(piece)
    parser.flush()
    assert (parser.message["content"], len(parser.calls)) == (None, 1)
    assert parser.calls[0]["function"] == call["function"]


def test_a_word_is_the_same_token_behind_a_space_and_behind_a_quote() -> None:
    [word] = TOKENIZER.encode("lunch")
    assert all(TOKENIZER.encode(text).count(word) == 1 for text in ("for lunch", '"lunch"', "\nlunch"))


@given(text=st.text(max_size=60))
def test_any_text_goes_through_the_tokenizer_and_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text
