"""The order desk: the database, the server against a real client, demonstrations, what the model is shown."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.compose import load_config
from art_cli.rollouts.environments import Settings, open_environment
from art_cli.rollouts.rollout_runner import RolloutPlan
from tests.support.models.recipes import load
from tests.support.paths import ROOT
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import Answer, ScriptedBackend, tool_call

RECIPE = ROOT / "recipes" / "mcp-tools"
recipe = load("mcp-tools")
desk, demos, scenarios, server = recipe.desk, recipe.demos, recipe.scenarios, recipe.server
TOKENIZER = recipe.model.make_tokenizer()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.replace("?", " ").split() if word.isdigit()]


def test_each_customer_has_one_order_each_order_one_parcel_and_a_seed_makes_the_same_desk() -> None:
    made = desk.Desk(3)
    orders = [int(made.call("order_of", customer)) for customer in desk.customers()]
    parcels = [int(made.call("parcel_of", order)) for order in orders]
    assert len(set(orders)) == len(set(parcels)) == desk.NUM_CUSTOMERS
    assert {desk.kind(order) for order in orders} == {"order"} and {desk.kind(each) for each in parcels} == {"parcel"}
    assert {made.call("item_of", order) for order in orders} == set(desk.ITEMS)
    assert {made.call("state_of", parcel) for parcel in parcels} == set(desk.STATES)
    assert [made.call(tool, 5) for tool in desk.TOOLS] == ["none"] * 4
    again = desk.Desk(3)
    assert [int(again.call("order_of", customer)) for customer in desk.customers()] == orders


def test_every_answer_is_what_its_calls_lead_to_and_none_that_is_evaluated_is_trained_on() -> None:
    made, seen = desk.Desk(), []
    for kind in (scenarios.train(), scenarios.evaluation()):
        for each in kind:
            (number,) = numbers(each["task"])
            for tool in each["calls"]:
                number = made.call(tool, int(number))
            assert number == each["answer"]
        seen.append({number for each in kind for number in numbers(each["task"])})
    assert not seen[0] & seen[1]
    assert len(scenarios.evaluation()) == 8 * scenarios.NUM_HELD_OUT
    assert all("answer" not in each for each in scenarios.unanswered())


def test_the_server_refuses_what_is_no_call_of_its_tools() -> None:
    made = desk.Desk()
    for params in ({}, {"name": "rm"}, {"name": "item_of", "arguments": {"order": "x"}}, {"name": "item_of"}):
        assert server.answer(made, "tools/call", params)["error"]["code"] == server.INVALID_PARAMS
    assert server.answer(made, "resources/list", {})["error"]["code"] == server.METHOD_NOT_FOUND


@pytest.mark.slow
async def test_who_makes_the_calls_that_a_question_needs_is_rewarded(tmp_path: Path) -> None:
    """Played through the recipe's own settings: the server is started as in config.yaml."""
    config = load_config(RECIPE / "config.yaml").config.rollout
    assert config.environment is not None
    open_environment(Settings(config.environment.name, dict(config.environment.args), directory=str(RECIPE)))
    made = desk.Desk()
    (chosen,) = [each for each in scenarios.evaluation()[:8] if len(each["calls"]) == 3]
    said: list[Answer] = []
    found = str(numbers(chosen["task"])[0])
    for tool in chosen["calls"]:
        said.append(tool_call(tool, **{desk.TOOLS[tool][0]: int(found)}))
        found = made.call(tool, int(found))
    answers: Iterator[Answer] = iter([*said, found, said[0], "lost and delivered"])
    stage = Stage(RECIPE, ScriptedBackend(lambda request: next(answers)))
    common: dict[str, Any] = {"scenario": chosen, "group_id": "g", "group_size": 2, "step": 0}
    plans = [RolloutPlan(trajectory_id=f"t{index}", index=index, **common) for index in range(2)]
    options = {"max_turns": config.max_turns, "environment": config.environment.model_dump()}
    async with stage.open(entry=None, processes=0, concurrency=1, **options) as runner:
        await runner.run(plans, stage.finished.append)
    right, wrong = stage.finished
    assert (right.error, right.returned_reward, right.metrics["tool_calls"]) == (None, 1.0, 3)
    assert (wrong.error, wrong.returned_reward) == (None, float(chosen["answer"] in ("lost", "delivered")))


def test_demonstrations_are_legal_calls_that_mostly_guess() -> None:
    """Each call has the last number mentioned, with a tool that takes it; between a third and two thirds are right."""
    answers = {each["task"]: each["answer"] for each in scenarios.train()}
    num_right = 0
    for demo in demos.talks():
        task, *talk = demo["messages"]
        last = str(numbers(task["content"])[0])
        for called, result in pairwise(talk[:-1]):
            if called["role"] != "assistant":
                continue
            ((name, arguments),) = [
                (each["function"]["name"], each["function"]["arguments"]) for each in called["tool_calls"]
            ]
            assert json.loads(arguments) == {desk.TOOLS[name][0]: int(last)} and desk.TOOLS[name][0] == desk.kind(
                int(last)
            )
            last = result["content"]
        assert talk[-1]["content"] == last and talk[0]["role"] == "assistant"
        num_right += last == answers[task["content"]]
    assert demos.NUM_DEMOS / 3 < num_right < demos.NUM_DEMOS * 2 / 3


def test_every_turns_prompt_goes_on_from_the_tokens_before_it_and_every_reply_fits() -> None:
    limit = load_config(RECIPE / "config.yaml").config.rollout.sampling.max_tokens
    assert limit is not None
    for demo in demos.talks()[:50]:
        before: list[int] = []
        for place, message in enumerate(demo["messages"]):
            if message["role"] != "assistant":
                continue
            shown, whole = (
                TOKENIZER.encode(
                    TOKENIZER.apply_chat_template(
                        demo["messages"][:end], tools=demo["tools"], tokenize=False, add_generation_prompt=asks
                    ),
                    add_special_tokens=False,
                )
                for end, asks in ((place, True), (place + 1, False))
            )
            assert shown[: len(before)] == before
            before = whole[:-1]  # without the line break behind the reply's end, which the next prompt brings
            assert before[: len(shown)] == shown and before[-1] == TOKENIZER.eos_token_id
            assert len(before) - len(shown) <= limit
