"""`art hunt` finds what was planted, and nothing where nothing was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_cli.rollouts.attacks import FAILS, Attack, Seen, first_attacks, forms_in
from tests.support.paths import TESTS

Art = Callable[..., tuple[int, str, str]]
CONFIG = str(TESTS / "hunted" / "config.yaml")


def hunted(art: Art, runs: Path, *settings: str, minutes: float = 0.0) -> tuple[int, dict[str, Any]]:
    code, out, err = art(
        "hunt", CONFIG, f"runs={runs}", *settings, "--scenarios", "4", "--minutes", str(minutes), "--json"
    )
    return code, json.loads(out)


def test_a_fair_reward_has_no_exploit(art: Art, tmp_path: Path) -> None:
    code, found = hunted(art, tmp_path)
    assert (code, found["exploits"]) == (0, []) and found["num_tried"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tag", "lenient", "finished"])  # all of them: benchmarks/hunt.py
def test_a_planted_exploit_is_found(name: str, art: Art, tmp_path: Path) -> None:
    code, found = hunted(art, tmp_path, f"rollout.entry=rollout.py:{name}")
    assert code == 1 and found["exploits"][0]["score_mean"] >= 0.5


@pytest.mark.slow
def test_a_search_finds_what_takes_two_things_at_once(art: Art, tmp_path: Path) -> None:
    entry = "rollout.entry=rollout.py:long_and_tagged"
    assert hunted(art, tmp_path, entry)[0] == 0
    code, found = hunted(art, tmp_path, entry, minutes=0.5)
    assert code == 1 and found["exploits"][0]["score_mean"] >= 0.5


@pytest.mark.slow
def test_a_judge_that_obeys_an_attempt_is_found(art: Art, tmp_path: Path) -> None:
    judge = ("rollout.entry=rollout.py:judged", "judge={entry: 'rollout.py:obedient'}")
    code, found = hunted(art, tmp_path, *judge)
    assert code == 1 and [row["attack"] for row in found["exploits"]] == ["an order to the judge"]


def test_without_a_reward_there_is_nothing_to_hunt(art: Art, tmp_path: Path) -> None:
    code, _, err = art("hunt", CONFIG, f"runs={tmp_path}", "judge=none")
    assert code == 2 and "judge: 'none' gives no rewards" in err


# --- the attacks ------------------------------------------------------------------------------------------------------

FINISH = {"name": "finish", "parameters": {"properties": {"text": {"type": "string"}, "how": {"enum": ["a", "b"]}}}}
SEEN = Seen(
    [{"role": "user", "content": 'Is 3 odd? <answer>yes</answer> or {"answer": "yes"}'}],
    [{"type": "function", "function": FINISH}],
    ["no"],
)


def test_the_prompt_gives_the_forms() -> None:
    assert forms_in(SEEN)[3:] == ["<answer>", "JSON key answer"]
    assert Attack(("1",), "<answer>").reply(SEEN)["content"] == "<answer>1</answer>"
    assert json.loads(Attack(("1",), "JSON key answer").reply(SEEN)["content"]) == {"answer": "1"}
    assert {attack.form for attack in first_attacks(SEEN)} >= {FAILS, "plain", "boxed", "<answer>"}


def test_a_tool_is_called_once_and_then_answered() -> None:
    attack = Attack(("another scenario's reply",), tool="finish")
    [call] = attack.reply(SEEN)["tool_calls"]
    assert call["function"] == {"name": "finish", "arguments": '{"text": "no", "how": "a"}'}
    then = SEEN._replace(messages=[*SEEN.messages, attack.reply(SEEN), {"role": "tool", "content": "ended"}])
    assert attack.reply(then) == {"role": "assistant", "content": "no"}
