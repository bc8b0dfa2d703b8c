"""Function calling: questions read and split, the checker beside the leaderboard's own, and what a reply is worth.

The questions are some written by hand in the leaderboard's format, and all of its own where bfcl-eval is installed.
"""

import asyncio
import importlib
import json
import random
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_cli import ArtError
from art_cli.config.compose import load_config
from art_cli.loop.train import train
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.run_dir import RunDir
from tests.support.models.recipes import ScriptedPolicy, load
from tests.support.paths import ROOT

RECIPE = load("function-calling")
DIRECTORY = ROOT / "recipes" / "function-calling"
needs_package = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="needs bfcl-eval")

Check = Callable[[dict[str, Any], dict[str, Any]], bool]  # scenario, arguments -> whether the call is right


def function(name: str, required: str, **types: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "dict", "properties": types, "required": required.split()}
    return {"name": name, "description": f"The {name}.", "parameters": parameters}


STRING, INTEGER, FLOAT, BOOLEAN = ({"type": name} for name in ("string", "integer", "float", "boolean"))
WEATHER = function("weather.get", "city", city=STRING, days=INTEGER, unit={"type": "string", "enum": ["C", "F"]})
AREA = function("area", "sides", sides={"type": "array", "items": FLOAT}, exact=BOOLEAN)
FILTER = function("filter", "by", by={"type": "dict"}, each={"type": "array", "items": {"type": "dict"}})
SCALE = function("scale", "factor", factor=FLOAT)
QUESTIONS: dict[str, list[tuple[Any, str, Any]]] = {  # category -> functions, question, right values
    "simple_python": [
        ([WEATHER], "Weather in New York for 3 days?", {"city": ["New York", "NY"], "days": [3], "unit": ["", "C"]}),
        ([AREA], "Area with sides 1 and 2?", {"sides": [[1, 2], [1.0, 2.0]], "exact": ["", True]}),
        ([FILTER], "Filter red ones.", {"by": [{"colour": ["red"], "size": ["", 3]}], "each": ["", [{"a": [1]}]]}),
        ([SCALE], "Scale by 2.", {"factor": [2.0]}),
        ([SCALE], "Scale by the width.", {"factor": ["width"]}),
        ([SCALE], "Nothing is right here.", {"factor": []}),
        ([SCALE], "A long answer?", {"factor": ["x" * 140]}),
    ],
    "live_simple": [([WEATHER], "Oslo?", {"city": ["Oslo"], "days": ["", 1], "unit": ["", "C"]})],
    "multiple": [([SCALE, AREA], "Area of 3?", {"sides": [[3.0]], "exact": [""]})],
    "irrelevance": [([function("song", "title", title=STRING)], "Who was first?", None)],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the package has it, of the questions above."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "possible_answer").mkdir()
    for category, rows in QUESTIONS.items():
        lines, answers = [], []
        for number, (functions, question, right) in enumerate(rows):
            name = {"id": f"{category}_{number}"}
            lines.append(name | {"question": [[{"role": "user", "content": question}]], "function": functions})
            answers.append(name | {"ground_truth": [{functions[-1]["name"]: right}]})
        write(directory / f"BFCL_v4_{category}.json", lines)
        if category != "irrelevance":
            write(directory / "possible_answer" / f"BFCL_v4_{category}.json", answers)
    return directory


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture(scope="module")
def by_hand(data: Path) -> dict[str, dict[str, Any]]:
    return {scenario["id"]: scenario for scenario in RECIPE.questions.read_questions(data)}


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return list(RECIPE.questions.read_questions(RECIPE.questions.data_directory()))


def test_a_question_whose_answer_is_too_long_or_missing_is_left_out(by_hand: dict[str, Any]) -> None:
    assert set(by_hand) == {
        *(f"simple_python_{number}" for number in range(5)),
        "live_simple_0",
        "multiple_0",
        "irrelevance_0",
    }
    assert by_hand["irrelevance_0"]["answer"] is None


def test_functions_are_shown_in_a_line_each_with_their_types(by_hand: dict[str, Any]) -> None:
    shown = RECIPE.rollout.ask(by_hand["multiple_0"])[-1]["content"]
    assert shown == (
        "scale(factor: float): The scale.\narea(sides: array of float, exact?: boolean): The area.\n\nArea of 3?"
    )
    assert "unit?: C|F" in RECIPE.rollout.ask(by_hand["live_simple_0"])[-1]["content"]


@pytest.mark.parametrize(
    ("id", "arguments", "right"),
    [
        ("simple_python_0", {"city": "new-york", "days": 3}, True),  # text without case and punctuation
        ("simple_python_0", {"city": "NY", "days": 3, "unit": "C"}, True),
        ("simple_python_0", {"city": "NY", "days": 3, "unit": "F"}, False),
        ("simple_python_0", {"city": "NY", "days": 3, "place": "C"}, False),  # no such parameter
        ("simple_python_0", {"city": "NY", "days": "3"}, False),
        ("simple_python_0", {"city": "NY", "days": True}, False),
        ("simple_python_0", {"city": "NY"}, False),  # days is needed by the answer
        ("simple_python_0", {"days": 3}, False),  # city is needed by the function
        ("simple_python_1", {"sides": [1, 2]}, True),
        ("simple_python_1", {"sides": [1.0, 2.0], "exact": True}, True),
        ("simple_python_1", {"sides": [2, 1]}, False),
        ("simple_python_1", {"sides": "12"}, False),
        ("simple_python_1", {"sides": [[1], [2]]}, False),
        ("simple_python_2", {"by": {"colour": "Red"}}, True),
        ("simple_python_2", {"by": {"colour": "red", "size": 3}, "each": [{"a": 1}]}, True),
        ("simple_python_2", {"by": {"colour": "red"}, "each": [{"a": 1}, {"a": 1}]}, False),
        ("simple_python_2", {"by": {"colour": "red"}, "each": [1]}, False),
        ("simple_python_2", {"by": {"size": 3}}, False),
        ("simple_python_2", {"by": {"colour": "red", "shape": 1}}, False),
        ("simple_python_3", {"factor": 2}, True),  # an integer for a float
        ("simple_python_3", {"factor": "2"}, False),
        ("simple_python_4", {"factor": "width"}, True),  # a variable in place of its value
        ("simple_python_4", {"factor": "Width"}, False),
        ("simple_python_4", {"factor": 2.0}, False),
    ],
)
def test_arguments_are_right_by_the_leaderboard_s_rules(
    by_hand: dict[str, Any], id: str, arguments: dict[str, Any], right: bool
) -> None:
    assert ours(by_hand[id], arguments) is right


@needs_package
def test_the_leaderboard_s_checker_says_the_same_of_the_calls_by_hand(by_hand: dict[str, Any], theirs: Check) -> None:
    draw = random.Random(0)
    for scenario in by_hand.values():
        compare(scenario, theirs, draw, num=400)


@needs_package
def test_the_leaderboard_s_checker_says_the_same_of_all_its_questions(
    real: list[dict[str, Any]], theirs: Check
) -> None:
    draw = random.Random(0)
    verdicts = [verdict for scenario in real for verdict in compare(scenario, theirs, draw, num=20)]
    assert len(verdicts) > 10_000
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8


def ours(scenario: dict[str, Any], arguments: dict[str, Any]) -> bool:
    answer = scenario["answer"]
    [schema] = [each["parameters"] for each in scenario["functions"] if each["name"] == answer["name"]]
    verdict: bool = RECIPE.checker.is_right(arguments, schema, answer["arguments"])
    return verdict


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Check:
    """The package's `ast_checker`, as it is. It imports the clients of all providers for a table of model names, which
    it reads to learn whether a model writes "_" for "."; an empty class stands in for the table's module."""

    class Table(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return SimpleNamespace(underscore_to_dot=False)

    table = SimpleNamespace(MODEL_CONFIG_MAPPING=Table())
    monkeypatch.setitem(sys.modules, "bfcl_eval.constants.model_config", table)
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def check(scenario: dict[str, Any], arguments: dict[str, Any]) -> bool:
        answer, category = scenario["answer"], scenario["category"]
        call, truth = [{answer["name"]: arguments}], [{answer["name"]: answer["arguments"]}]
        try:
            verdict = checker.ast_checker(scenario["functions"], call, truth, python, category, "model")
        except (TypeError, AttributeError, KeyError):
            return False
        return bool(verdict["valid"])

    return check


def compare(scenario: dict[str, Any], theirs: Check, draw: random.Random, *, num: int) -> list[bool]:
    """Returns the verdicts on the example and on random calls, which both checkers agree on."""
    if scenario["answer"] is None:
        return []
    verdicts = []
    drawn = [random_arguments(scenario["answer"]["arguments"], draw) for _ in range(num)]
    for arguments in [RECIPE.questions.example_call(scenario["answer"])["arguments"], *drawn]:
        verdicts.append(ours(scenario, arguments))
        assert verdicts[-1] == theirs(scenario, arguments), (scenario["id"], arguments)
    return verdicts


def random_arguments(right: dict[str, list[Any]], draw: random.Random) -> dict[str, Any]:
    """Returns right values, of which now and then one is changed, left out, or has another name."""
    arguments: dict[str, Any] = {}
    for name, values in right.items():
        value = draw.choice(values)
        if value != "" or draw.random() < 0.1:
            arguments[name] = plain(value, draw)
    if arguments and draw.random() < 0.5:
        name = draw.choice(list(arguments))
        value = arguments.pop(name)
        changed = [str(value).upper(), f"{value}.", [value], {"a": value}, None, 1, 1.5, True, "", [], {}, [1], [None]]
        changed += [float(value), -value] if type(value) is int else []
        changed += [value[::-1], value[1:], [*value, 7]] if type(value) is list else []
        if (drawn := draw.randrange(len(changed) + 2)) < len(changed):
            arguments[name] = changed[drawn]
        elif drawn == len(changed):
            arguments[f"{name}_"] = value
    return arguments


def plain(value: Any, draw: random.Random) -> Any:
    """Returns a right value as a call would give it: in a dict each entry has a list of right values."""
    if isinstance(value, dict):
        return {
            name: plain(draw.choice(options), draw)
            for name, options in value.items()
            if "" not in options or draw.random() < 0.5
        }
    return [plain(each, draw) for each in value] if isinstance(value, list) else value


def call(name: str = "weather.get", **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (call(city="NY", days=3), 1.0),
        (f" {call(city='NY', days=3)}\n", 1.0),
        (call(city="NY", days=4), 0.5),  # 0.3 and 0.4 times one of two
        (call(city="NY"), 0.5),
        (call(city="NY", days=3, unit="F"), 0.3 + 0.4 * 2 / 3),
        (call(), 0.3),
        (call("area", city="NY", days=3), 0.1),
        (call(city="NY", days=3) * 2, 0.0),
        (f"[{call(city='NY', days=3)}]", 0.0),
        ('{"name": "weather.get", "arguments": "New York"}', 0.0),
        ('{"name": "weather.get", "arguments": {}, "note": 1}', 0.0),
        ('{"name": ["weather.get"], "arguments": {}}', 0.0),
        ("none", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_a_reply_earns_by_how_much_of_the_call_is_right(by_hand: dict[str, Any], reply: str, reward: float) -> None:
    outcome = asyncio.run(RECIPE.rollout.rollout(ScriptedPolicy(lambda _: reply), by_hand["simple_python_0"]))
    assert outcome.reward == pytest.approx(reward)
    assert outcome.metrics == {"right": reward == 1.0, "right_simple_python": reward == 1.0}


@pytest.mark.parametrize(("reply", "reward"), [("none", 1.0), (" None.\n", 1.0), ("none of them", 0.0), (call(), 0.0)])
def test_where_no_function_fits_only_the_refusal_counts(by_hand: dict[str, Any], reply: str, reward: float) -> None:
    assert RECIPE.rollout.score(reply, by_hand["irrelevance_0"]) == reward


def test_the_examples_are_worth_what_they_show() -> None:
    functions, replies = RECIPE.rollout.EXAMPLES[::2], RECIPE.rollout.EXAMPLES[1::2]
    for shown, reply in zip(functions, replies, strict=True):
        read = RECIPE.rollout.read_call(reply)
        assert reply == RECIPE.rollout.REFUSAL if read is None else read[0] in shown


def shown_functions(scenarios: list[dict[str, Any]]) -> set[str]:
    return {function["name"] for scenario in scenarios for function in scenario["functions"]}


def test_questions_that_show_a_function_of_one_name_are_one_family(by_hand: dict[str, Any]) -> None:
    found = [{scenario["id"] for scenario in family} for family in RECIPE.scenarios.families(list(by_hand.values()))]
    assert found == [
        {"simple_python_0", "live_simple_0"},
        {"simple_python_1", "simple_python_3", "simple_python_4", "multiple_0"},
        {"simple_python_2"},
        {"irrelevance_0"},
    ]


@needs_package
def test_no_function_of_a_held_out_question_is_shown_in_training(real: list[dict[str, Any]]) -> None:
    training, held_out = RECIPE.scenarios.split(real)
    assert not shown_functions(training) & shown_functions(held_out)
    assert held_out == RECIPE.scenarios.evaluation()
    assert len(training) > 700 and len(held_out) > 100
    assert {scenario["category"] for scenario in held_out} == set(RECIPE.questions.CATEGORIES)


@needs_package
def test_every_second_question_of_training_calls_for_a_refusal(real: list[dict[str, Any]]) -> None:
    played = RECIPE.scenarios.train()
    assert {scenario["category"] for scenario in played[1::2]} == {"irrelevance"}
    assert [scenario["category"] for scenario in played[::2]] == [*RECIPE.scenarios.TURNS[::2]] * (len(played) // 6)
    ids = {scenario["id"] for scenario in played}
    assert len(ids) == len(played) > 300
    assert ids < {scenario["id"] for scenario in RECIPE.scenarios.split(real)[0]}


@needs_package
def test_nearly_every_question_has_a_right_reply(real: list[dict[str, Any]]) -> None:
    """The first right values make a right call, but in a few whose values the leaderboard's own checker refuses."""
    refused = []
    for scenario in real:
        example = RECIPE.questions.example_call(scenario["answer"])
        if RECIPE.rollout.score(json.dumps(example) if example else "none", scenario) != 1.0:
            refused.append(scenario["id"])
    assert len(refused) <= 2, refused


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr(RECIPE.questions, "find_spec", lambda name: None)
    with pytest.raises(ArtError, match="pip install --no-deps bfcl-eval==2026.3.23"):
        RECIPE.questions.data_directory()


@needs_package
def test_it_runs_with_a_small_random_model(tmp_path: Path) -> None:
    settings = ["model.base=builtin:tiny", "train.steps=1", "rollout.groups_per_step=4", "eval=null"]
    loaded = load_config(DIRECTORY / "config.yaml", [*settings, f"runs={tmp_path}"])
    assert loaded.config.rollout.scenarios is not None
    assert load_scenarios(loaded.config.rollout.scenarios, loaded.directory) == RECIPE.scenarios.train()
    run = RunDir(asyncio.run(train(loaded)).root)
    assert [row.reward for row in run.scored(0)] == [0.0] * 16
