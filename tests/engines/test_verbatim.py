"""Call arguments are preserved verbatim: in the templates sent to vLLM, and in vLLM's parsed replies."""

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from art_cli.chat.replies import Choice
from art_cli.chat.requests import Request, Sampling
from art_cli.engines.vllm.vllm_server import Verbatim, restore_arguments
from tests.support.models.template_talks import FAMILIES, LOOSE, TIDY, TOOLS, template_of

WRITES_ANEW = ["Qwen 2.5", "Qwen3", "Qwen3 2507", "Llama 3.1", "Llama 3.2"]


def asked(*arguments: str) -> Request:
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": "add", "arguments": text}}
        for place, text in enumerate(arguments)
    ]
    messages: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
    for call in calls:
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "5"}]
    return Request(model="policy", messages=messages, tools=TOOLS, sampling=Sampling())


def as_vllm_renders(template: str | None, request: Request) -> str:
    """Arguments parsed, then the template."""
    messages = copy.deepcopy(request.messages)
    assert messages is not None
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    texts, _ = render_jinja_template(
        [messages], tools=request.tools, chat_template=template, add_generation_prompt=True
    )
    return str(texts[0])


@pytest.mark.parametrize("name", WRITES_ANEW)
def test_a_prompt_has_each_call_as_it_was_written(name: str) -> None:
    template = template_of(FAMILIES[name])
    verbatim, request = Verbatim(template), asked(TIDY, LOOSE, '{"a":2,"b":3}')
    before = copy.deepcopy(request)
    text = as_vllm_renders(verbatim.template, verbatim.put_into(request))
    tidy = as_vllm_renders(template, asked(TIDY, TIDY, TIDY))
    one, _, rest = tidy.partition(TIDY)
    two, _, rest = rest.partition(TIDY)
    three, _, end = rest.partition(TIDY)
    assert text == one + TIDY + two + LOOSE + three + '{"a":2,"b":3}' + end
    assert request == before
    assert as_vllm_renders(verbatim.template, asked(TIDY, LOOSE)) == as_vllm_renders(template, asked(TIDY, LOOSE))


def test_what_no_template_can_be_made_to_keep_is_left_alone() -> None:
    unknown, plain = Verbatim(None), Verbatim("{{ messages[0].content }}")
    for verbatim in (unknown, plain):
        assert verbatim.put_into(asked(LOOSE)) == asked(LOOSE)
    qwen = Verbatim(template_of(FAMILIES["Qwen 2.5"]))
    for arguments in ("", "[1]", "{broken", '"text"'):
        assert qwen.put_into(asked(arguments)) == asked(arguments)
    llama = Verbatim(template_of(FAMILIES["Llama 3.1"]))
    request = Request(
        model="policy",
        messages=asked(LOOSE).messages,
        sampling=Sampling(),
        template_kwargs={"builtin_tools": ["add"]},
    )
    assert llama.put_into(request) == request


def choice(text: str, *arguments: str) -> Choice:
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": each}} for each in arguments]
    return Choice(index=0, message={"role": "assistant", "content": None, "tool_calls": calls}, tokens=list(text))


def test_a_parsed_call_gets_the_spelling_of_its_tokens() -> None:
    text = f'{{"a": 9}} <tool_call>{{"name": "add", "arguments": {LOOSE}}}</tool_call>' + '{"arguments":{"a":2,"b":3}}'
    found = choice(text, TIDY, TIDY, TIDY)
    restore_arguments(found)
    assert found.message is not None
    written = [call["function"]["arguments"] for call in found.message["tool_calls"]]
    assert written == [LOOSE, '{"a":2,"b":3}', TIDY]  # the third stands nowhere


@pytest.mark.parametrize("text", ["", '{"a": ' * 3000, "{" * 5000, '{"a": 2, "b": 4}', "\udc80{"])
def test_a_call_that_is_not_in_the_tokens_stays(text: str) -> None:
    found = choice(text, TIDY)
    restore_arguments(found)
    assert found == choice(text, TIDY)
