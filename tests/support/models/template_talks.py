"""A conversation in the chat template of each model family: which of its turns branch, and where.

The model calls a tool twice, answers, is asked again, calls and answers: five turns, four of which may continue the one
before. Calls come tidy, as Python's json.dumps writes their arguments, or loose, with other spaces. The client parses
the arguments and writes them again, and keeps everything else of a reply, thoughts too.
"""

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from art_cli.chat.requests import Sampling
from art_cli.engines.embedded.call_syntax import call_of
from art_cli.engines.embedded.chat_prompts import Prompt
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import Turn, prompt, sequence
from tests.support.paths import TESTS
from tests.support.standins.scripted import Engine
from tests.support.standins.template_backend import TemplateBackend, scripted

Json = dict[str, Any]
OWN = TESTS / "chat" / "templates"
TIDY, LOOSE = '{"a": 2, "b": 3}', '{"b":3,"a":  2}'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}
]
CALLS, ANSWER = (True, True, False, True, False), "The sum is 5."  # whether each turn is a call


class Family(NamedTuple):
    """How a family's model writes a turn: `call` with %s for the arguments, `answer` with %s for its text."""

    template: str  # a file of TRL, or of tests/chat/templates
    end: str
    call: str
    answer: str = "%s"
    call_end: str = ""  # the token that ends a turn with a call, where it is another one


HERMES = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
THOUGHT = "<think>\nI add.\n</think>\n\n"
ANALYSIS = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
LLAMA = '{"name": "add", "parameters": %s}'
FAMILIES = {
    "Qwen 2.5": Family("qwen2_5", "<|im_end|>", HERMES),
    "Qwen3": Family("qwen3", "<|im_end|>", HERMES),
    "Qwen3, thinking": Family("qwen3", "<|im_end|>", THOUGHT + HERMES, THOUGHT + "%s"),
    "Qwen3 2507": Family("qwen3_instruct_2507", "<|im_end|>", HERMES),
    "Llama 3.1": Family("llama3_1", "<|eot_id|>", LLAMA),
    "Llama 3.2": Family("llama3_2", "<|eot_id|>", LLAMA),
    "Mistral v3": Family("mistral_v3", "</s>", '[TOOL_CALLS][{"name": "add", "arguments": %s, "id": "Ab3dEf6h%d"}]'),
    "Mistral v7": Family("mistral_v7", "</s>", '[TOOL_CALLS][{"name": "add", "arguments": %s, "id": "Ab3dEf6h%d"}]'),
    "Mistral v13": Family("mistral_v13", "</s>", "[TOOL_CALLS]add[ARGS]%s"),
    "gpt-oss": Family(
        "gptoss",
        "<|return|>",
        ANALYSIS + "<|channel|>commentary to=functions.add <|constrain|>json<|message|>%s",
        ANALYSIS + "<|channel|>final<|message|>%s",
        "<|call|>",
    ),
}


class HarmonyBackend(TemplateBackend):
    """Reads gpt-oss's channels as vLLM does; the embedded engine does not know them."""

    def read(self, prompt: Prompt, text: str) -> Json:
        message: Json = {"role": "assistant", "content": None}
        for channel, body in re.findall(r"<\|channel\|>(.*?)<\|message\|>(.*?)(?=<\||$)", text, re.DOTALL):
            if channel == "analysis":
                message["reasoning_content"] = body
            elif channel == "final":
                message["content"] = body
            else:
                message["tool_calls"] = [call_of("add", body)]
        return message


class Branch(NamedTuple):
    turn: int
    sampled: str  # what stood in the sequence of the turn before, from where the prompt differs
    written: str  # what the prompt has there


async def talk(name: str, arguments: str) -> list[Branch]:
    """The turns that do not continue the one before."""
    family = FAMILIES[name]
    calls = [family.call.replace("%s", arguments).replace("%d", str(number)) for number in range(len(CALLS))]
    texts = [calls[number] if is_call else family.answer % ANSWER for number, is_call in enumerate(CALLS)]
    backend: TemplateBackend
    if family.call_end:
        ends = [family.call_end if is_call else family.end for is_call in CALLS]
        whole = [text + end for text, end in zip(texts, ends, strict=True)]
        backend = HarmonyBackend(scripted(*whole), template=template_of(family), end="")
    else:
        backend = TemplateBackend(scripted(*texts), template=template_of(family), end=family.end)
    gateway = Gateway(Engine(backend), defaults=Sampling(), seed=0, max_turns=9)
    key = gateway.open(name)
    messages: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]
    async with gateway.serve() as url, AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for is_call in CALLS:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            messages += _go_on(reply.choices[0].message.model_dump(exclude_none=True), is_call)
    turns = gateway.close(key).turns
    return [found for index in range(1, len(turns)) if (found := _branch(backend, turns, index)) is not None]


def template_of(family: Family) -> str:
    """The template's text. Those of TRL need TRL."""
    own = OWN / f"{family.template}.jinja"
    if own.exists():
        return own.read_text()
    trl = find_spec("trl")
    assert trl is not None and trl.origin is not None, "TRL is not installed"
    return (Path(trl.origin).parent / "chat_templates" / own.name).read_text()


def _go_on(message: Json, is_call: bool) -> list[Json]:
    """The reply as the client sends it back, and what comes next: the tool's answer, or another question."""
    assert bool(message.get("tool_calls")) == is_call, message
    if not is_call:
        return [message, {"role": "user", "content": "And again?"}]
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return [message, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]


def _branch(backend: TemplateBackend, turns: Sequence[Turn], index: int) -> Branch | None:
    before, asked = sequence(turns, index - 1), prompt(turns, index)
    if asked[: len(before)] == before:
        return None
    same = next(n for n, (old, new) in enumerate(zip(before, asked, strict=False)) if old != new)
    decode = backend.vocabulary.decode
    return Branch(index, decode(before[same : same + 24]), decode(asked[same : same + 24]))
