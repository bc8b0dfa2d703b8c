"""The assistant: requests and their records, what an attempt earns, and that the rubric's rules give the same."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from art_cli import Outcome
from art_cli.config.compose import load_config
from art_cli.judges.providers.rule import answer
from art_cli.judges.ruler.attempt_tree import Attempt, read_conversation
from art_cli.judges.ruler.prompt import read_instructions, write_prompt
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from tests.support.models.recipes import Message, ScriptedPolicy, load
from tests.support.paths import ROOT

RECIPE = load("assistant")
DIRECTORY = ROOT / "recipes" / "assistant"
EVALUATION = list(RECIPE.scenarios.evaluation())


def play(scenario: dict[str, Any], *replies: str) -> tuple[Outcome, list[Message]]:
    """Returns what the rollout returns, and the whole conversation."""
    left = list(replies)
    policy = ScriptedPolicy(lambda messages: left.pop(0))
    outcome: Outcome = asyncio.run(RECIPE.rollout.rollout(policy, scenario))
    return outcome, [*policy.seen[-1], {"role": "assistant", "content": policy.said[-1]}]


def request_of(scenario: dict[str, Any]) -> Any:
    return RECIPE.desk.make_request(scenario["seed"], is_new=scenario["is_new"])


def replies_of(scenario: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The right replies, and some that are wrong in one place."""
    request = request_of(scenario)
    call = json.dumps({request.tool: request.key})
    return {
        "right": (call, f" {request.answer}\n"),
        "more than the answer": (call, f"It is {request.answer}."),
        "wrong answer": (call, "Sunday"),
        "nothing said": (call, ""),
        "wrong key": (json.dumps({request.tool: "Zoe"}), request.answer),
        "wrong tool": (json.dumps({"customer" if request.tool == "order" else "order": request.key}), request.answer),
        "no tool": (json.dumps({"email": request.key}), request.answer),
        "no call": (request.answer,),
        "two calls": (f"{call}{call}",),
        "no object": (f"[{call}]",),
        "deep": ("[" * 100_000,),
    }


REWARDS = {"right": 1.0, "more than the answer": 0.3, "wrong answer": 0.3, "nothing said": 0.3} | dict.fromkeys(
    ("wrong key", "wrong tool"), 0.1
)


@pytest.mark.parametrize("scenario", EVALUATION[:9], ids=lambda scenario: scenario["id"])
def test_an_attempt_earns_by_how_far_it_comes_and_the_rubric_s_rules_give_the_same(scenario: dict[str, Any]) -> None:
    played = {name: play(scenario, *replies) for name, replies in replies_of(scenario).items()}
    rewards = {name: outcome.reward for name, (outcome, _) in played.items()}
    assert rewards == {name: REWARDS.get(name, 0.0) for name in played}
    config = load_config(DIRECTORY / "config-ruler.yaml", []).config.judge
    assert config.name == "ruler"
    attempts = [Attempt(read_conversation(messages)) for _, messages in played.values()]
    instructions = read_instructions(config, DIRECTORY)
    prompt = write_prompt(attempts, order=range(len(attempts)), tools=[], instructions=instructions, seed="0")
    scores = {entry["id"]: entry["score"] for entry in json.loads(answer(prompt.messages)[0])["scores"]}
    assert [scores[name] for name in prompt.ids] == pytest.approx(list(rewards.values()))


def test_no_name_or_product_of_the_held_out_requests_is_trained_on() -> None:
    def values(scenarios: Any) -> set[str]:
        requests = [request_of(each) for each in scenarios]
        return {each.key for each in requests if each.tool != "order"} | {each.text for each in requests}

    training = list(RECIPE.scenarios.train())
    assert len(EVALUATION) >= 48 and len(training) >= 1000
    assert not values(EVALUATION) & values(training)
    desk = RECIPE.desk
    assert not set(desk.PEOPLE) & set(desk.NEW_PEOPLE) and not set(desk.PRODUCTS) & set(desk.NEW_PRODUCTS)


def test_each_request_names_its_key_and_its_record_has_the_answer() -> None:
    for scenario in EVALUATION:
        request = request_of(scenario)
        assert request == request_of(scenario)
        words = request.text.replace("?", "").replace(".", "").replace(",", "").split()
        assert request.key in words and request.answer in request.record.split()
        assert request.answer not in words


def test_it_runs_with_a_small_random_model_by_ruler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model calls nothing: each attempt is scored 0 by rollout and rule alike, and no weight changes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ["model.base=builtin:tiny", "train.steps=1", "rollout.groups_per_step=2", "eval=null"]
    loaded = load_config(DIRECTORY / "config-ruler.yaml", [*settings, f"runs={tmp_path}"])
    run = RunDir(asyncio.run(train(loaded)).root)
    rows = run.scored(0)
    assert len(rows) == 16
    assert [row.reward for row in rows] == [row.returned_reward for row in rows]
    assert all(row.scores[0].explanation.startswith("a rule, no model") for row in rows)  # type: ignore[union-attr]
