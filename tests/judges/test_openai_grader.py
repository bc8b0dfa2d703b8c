"""Graders of OpenAI's reinforcement fine-tuning as judges: each kind by its documented meaning, or refused by name."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.graders import PythonGrader, StringCheckGrader, TextSimilarityGrader
from pydantic import TypeAdapter

from art_cli.config.schema import FunctionJudgeConfig
from art_cli.judges import Verdict, make_judge
from art_cli.judges.openai_grader import calculate, rouge
from art_cli.runs.trajectory import Json, Score, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError

ENTRY = "art_cli.judges.openai_grader:OpenAIGrader"
OPENAIS = {"string_check": StringCheckGrader, "text_similarity": TextSimilarityGrader, "python": PythonGrader}
ITEM = {"id": "s", "reference_answer": "Paris", "facts": [{"year": 1900}, {"year": 2024}]}


def check(operation: str, reference: str = "{{ item.reference_answer }}", **changed: Any) -> Json:
    given = {"type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": reference}
    return {**given, "operation": operation, **changed}


def source(text: str) -> Json:
    return {"type": "python", "name": "code", "source": text, "image_tag": "2025-05-08"}


def multi(formula: str, **graders: Json) -> Json:
    return {"type": "multi", "name": "all", "graders": graders, "calculate_output": formula}


async def judged(grader: Json, *replies: str | Json, item: Json = ITEM) -> list[Verdict]:
    """The verdicts of a judge that is configured as a user does it."""
    group = [
        Trajectory(
            id=f"t{index}",
            group_id="g",
            group_size=len(replies),
            index=index,
            scenario=item,
            messages=[
                {"role": "user", "content": "Capital of France?"},
                {"role": "assistant", "content": reply} if isinstance(reply, str) else reply,
            ],
        )
        for index, reply in enumerate(replies)
    ]
    judge = make_judge(FunctionJudgeConfig(name="function", entry=ENTRY, options={"grader": grader}), Path.cwd())
    try:
        return list((await judge.judge(group)).values())
    finally:
        await judge.close()


def rewards(verdicts: Sequence[Verdict]) -> list[float]:
    return [verdict.reward for verdict in verdicts]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("eq", [1, 0, 0, 0]), ("ne", [0, 1, 1, 1]), ("like", [1, 1, 0, 0]), ("ilike", [1, 1, 1, 0])],
)
async def test_a_string_check_compares_as_openai_documents_it(operation: str, expected: list[float]) -> None:
    assert rewards(await judged(check(operation), "Paris", "It is Paris.", "paris", "Rome")) == expected


@pytest.mark.parametrize("grader", [check("eq"), source("def grade(s, i): return 1"), check("rouge_1")])
def test_the_graders_here_are_those_of_openais_own_types(grader: Json) -> None:
    if grader.get("operation") == "rouge_1":
        grader = similarity("rouge_1")
    assert TypeAdapter(OPENAIS[grader["type"]]).validate_python(grader, strict=True).to_dict() == grader


def similarity(metric: str) -> Json:
    given = {"type": "text_similarity", "name": "close", "input": "{{sample.output_text}}", "evaluation_metric": metric}
    return {**given, "reference": "{{item.reference_answer}}"}


def test_rouge_is_the_f1_of_what_two_texts_share() -> None:
    """the cat sat on the mat | the cat lay on a mat: 4 of 6 and 6 words are common, the 2-gram "the cat" of 5 and 5,
    no 3-gram of 4, and the subsequence "the cat on mat" of 4 words."""
    texts = "The cat sat on the mat.", "the cat lay, on a mat"
    assert [rouge(order, *texts) for order in (1, 2, 3, 0)] == pytest.approx([2 * 4 / 12, 2 * 1 / 10, 0, 2 * 4 / 12])
    assert rouge(0, "a b c d", "d a b") == pytest.approx(2 * 2 / 7)
    assert [rouge(order, "", "") for order in range(6)] == [0] * 6
    assert [rouge(order, "one two three four five", "One two three four five!") for order in range(6)] == [1] * 6


async def test_text_similarity_is_rouge() -> None:
    found = await judged(similarity("rouge_l"), "in Paris today", "Rome")
    assert rewards(found) == pytest.approx([2 * 1 / 4, 0])


async def test_openais_example_of_a_tool_call_is_graded_by_parts() -> None:
    """A reply without the call, and a reply with different arguments: missing template values give 0."""
    grader = multi(
        "0.5 * function_name + 0.5 * arguments",
        function_name=check("eq", "{{sample.output_tools[0].function.name}}", input="get_acceptors"),
        arguments=check("eq", "{{sample.output_tools[0].function.arguments}}", input='{"smiles": "{{item.smiles}}"}'),
    )

    def call(arguments: str) -> Json:
        function = {"name": "get_acceptors", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}

    replies = [call('{"smiles": "CCO"}'), call("{}"), "CCO"]
    found = await judged(grader, *replies, item={"smiles": "CCO"})
    assert rewards(found) == [1.0, 0.5, 0.0]
    assert found[1].scores == [Score(judge="function_name", score=1.0), Score(judge="arguments", score=0.0)]


async def test_a_python_grader_gets_the_sample_and_the_item() -> None:
    grader = source(
        "import json\n"
        "def grade(sample, item):\n"
        "    assert sample['choices'][0]['message']['content'] == sample['output_text']\n"
        "    assert sample['output_tools'] == []\n"
        "    year = (sample['output_json'] or {}).get('year')\n"
        "    return float(year == item['facts'][1]['year'])\n"
    )
    assert rewards(await judged(grader, '{"year": 2024}', '{"year": 1}', "2024?")) == [1.0, 0.0, 0.0]


async def test_a_path_goes_through_lists_and_what_is_no_text_is_json() -> None:
    grader = check("eq", "{{ item.facts[1].year }} {{item.facts[0]}} {{item['reference_answer']}}")
    assert rewards(await judged(grader, '2024 {"year": 1900} Paris', "2024")) == [1.0, 0.0]


async def test_a_template_in_a_reply_is_text() -> None:
    assert rewards(await judged(check("eq"), "{{item.reference_answer}}", "{{ sample.x }}")) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("(a + b) / 2", 0.375),
        ("0.5*a - -b^2", 0.3125),
        ("min(a, b, 1) + max(a, b) + abs(-b)", 1.0),
        ("floor(a + 1) + ceil(b) + sqrt(b)", 2.5),
        ("exp(a) * log(2)", math.exp(0.5) * math.log(2)),
    ],
)
def test_a_formula_is_calculated_by_its_operators_and_functions(formula: str, expected: float) -> None:
    """a = 0.5 and b = 0.25. A power comes before a sign, as in mathematics."""
    assert calculate(formula, {"a": 0.5, "b": 0.25}) == pytest.approx(expected)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ({"type": "score_model", "name": "m", "input": [], "model": "o3-mini"}, "no score_model .*use RULER"),
        ({"type": "label_model", "name": "m"}, "no label_model .*use RULER"),
        (
            similarity("fuzzy_match"),
            r"^judge.options.grader: no text_similarity fuzzy_match \(grade\): there is .*rouge_l\), python",
        ),
        (check("neq"), "no string_check neq"),
        (multi("a", a=multi("b", b=check("eq"))), r"no multi  \(a\)"),
        (multi("a + c", a=check("eq")), "calculate_output: 'c' cannot be calculated"),
        (multi("__import__('os').getcwd()", a=check("eq")), "cannot be calculated"),
        (multi("a.real", a=check("eq")), "'a.real' cannot be calculated"),
        (multi("[a][0]", a=check("eq")), "cannot be calculated"),
        (multi("a +", a=check("eq")), "SyntaxError"),
        (source("def grade(sample, item)"), "SyntaxError"),
        (source("def judge(sample, item): return 1"), "KeyError: 'grade'"),
        ({"type": "string_check", "operation": "eq", "input": "a"}, "KeyError: 'reference'"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name_before_a_run(grader: Json, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await judged(grader, "Paris")


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (check("eq", "{{item.answer}}"), r"\{\{item.answer\}\}: the scenario has no such value"),
        (check("eq", "{{reference_answer}}"), "the scenario has no such value"),
        (source("def grade(sample, item): return item['answer']"), "KeyError: 'answer'"),
        (source("def grade(sample, item): return float('nan')"), "not a finite number"),
        (source("def grade(sample, item): return None"), "TypeError"),
        (multi("1 / a", a=check("ne")), "ZeroDivisionError"),
        (multi("(a - 1) ^ 0.5", a=check("ne")), "TypeError"),
        (multi("9 ^ 9 ^ 9 ^ 9 + a", a=check("eq")), "OverflowError"),
    ],
)
async def test_what_fails_in_grading_is_an_error_and_no_zero(grader: Json, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        await judged(grader, "Paris")
