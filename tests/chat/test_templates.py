"""Turns that branch in the chat template of each model family; no other turn does (benchmarks/others/templates.py)."""

import json
from typing import Any

import pytest

from art_cli.engines.embedded.chat_prompts import StandIns
from tests.support.models.template_talks import FAMILIES, LOOSE, TIDY, talk

pytest.importorskip("trl")
BRANCHING = {
    "Qwen3, thinking": [3],  # thoughts go at the user's next question
    "Mistral v3": [3],  # the tools stand before the user's last message
    "Mistral v7": [3],
    "gpt-oss": [1, 2, 3, 4],  # calls, thoughts and the last token of a turn are written otherwise than they are sampled
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [TIDY, LOOSE], ids=["tidy", "loose"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_only_what_a_template_itself_changes_branches(family: str, arguments: str) -> None:
    """Spaces in calls are exempt: the next prompt has the arguments as sampled."""
    assert [branch.turn for branch in await talk(family, arguments)] == BRANCHING.get(family, [])


def test_arguments_that_a_template_does_not_write_once_are_rendered_as_objects() -> None:
    """Twice, not at all, or key by key: the stand-in is given up. A stand-in inside arguments is not taken for one."""
    call: dict[str, Any] = {"function": {"name": "f", "arguments": '{"a":1}'}}
    stand_ins = StandIns([{"role": "assistant", "tool_calls": [call, call]}])
    [message] = stand_ins.put_into([{"role": "assistant", "tool_calls": [call, call]}])
    first, second = (json.dumps(one["function"]["arguments"]) for one in message["tool_calls"])
    assert stand_ins.replaced(f"x {first} y {second}") == 'x {"a":1} y {"a":1}'
    (name,) = json.loads(first)
    for written in (f"{first} {first} {second}", f"{first}", f"{first} {second} {name}"):
        assert stand_ins.replaced(written) is None
