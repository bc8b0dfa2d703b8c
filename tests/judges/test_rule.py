"""builtin:rule: scores from rubric rules, through RULER's prompt, parser and votes."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.providers.rule import Rule, RuleError, answer, holds, read_attempts, read_rules
from art_cli.judges.ruler.attempt_tree import read_attempt
from art_cli.judges.ruler.prompt import read_instructions, write_prompt
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.judges.ruler.verdict import parse_verdict
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import UsageError
from tests.support.judges import judge_server
from tests.support.judges.ruler_cases import SYSTEM, TASK, attempt, hostile_group

RUBRIC = """\
Good attempts book a flight and say which.
rule: +0.4 if tool 1 has "flight {number}"
rule: +0.7 if tool 1 has "flight {number}" and assistant -1 has "{number}" and assistant -1 lacks 'sorry'
rule: -0.2 if assistant -1 has "sorry"
"""


def flights(*ends: tuple[str, str]) -> list[Trajectory]:
    """A group whose attempts differ in the tool result and the last reply."""
    call: Json = {"id": "a", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    begin: list[Json] = [SYSTEM, TASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools: list[Json] = [{"role": "tool", "tool_call_id": "a", "content": found} for found, _ in ends]
    said: list[Json] = [{"role": "assistant", "content": text} for _, text in ends]
    return [
        attempt(index, [*begin, tool, last], size=len(ends))
        for index, (tool, last) in enumerate(zip(tools, said, strict=True))
    ]


def judge(group: list[Trajectory], rubric: str = RUBRIC, **settings: Any) -> list[Any]:
    given = {"name": "ruler", "model": "builtin:rule", "cache": None} | settings

    async def ask() -> list[Any]:
        ruler = RulerJudge(RulerJudgeConfig(**given), Path("."), rubric=rubric)
        try:
            verdicts = await ruler.judge(group)
        finally:
            await ruler.close()
        assert ruler.usage.cost_usd == 0
        return [verdicts[each.id] for each in group]

    return asyncio.run(ask())


@pytest.mark.parametrize("votes", [1, 3])
def test_attempts_get_the_points_of_the_rules_that_hold_kept_within_0_and_1(votes: int) -> None:
    """0.4 + 0.7 is kept to 1; 0.4 for another number; 0.4 - 0.2 with the word that the second rule excludes; 0; -0.2
    is kept to 0."""
    group = flights(
        ("flight 12", "Booked 12."),
        ("flight 12", "Booked 123."),
        ("flight 12", "sorry, 12"),
        ("no", "x"),
        ("", "sorry"),
    )
    verdicts = judge(group, votes=votes)
    assert [each.reward for each in verdicts] == pytest.approx([1.0, 0.4, 0.2, 0.0, 0.0])
    for each in verdicts:
        [score] = each.scores
        assert score.model == "builtin:rule" and score.explanation.startswith("a rule, no model: ")
    assert verdicts[2].scores[0].explanation.endswith("rules met: 1, 3 of 3")


def test_large_groups_are_judged_in_parts() -> None:
    group = flights(*[("flight 1", f"{index} sorry") for index in range(9)], ("flight 1", "1"))
    assert [each.reward for each in judge(group, max_group=4)] == pytest.approx([0.2] * 9 + [1.0])


@pytest.mark.parametrize("seed", range(60))
def test_any_group_is_read_as_the_instructions_describe_its_record(seed: int) -> None:
    """Against the reader of the tests' own judge. Pieces of a message are compared by their words."""
    group = hostile_group(random.Random(seed))
    attempts, order = [read_attempt(each) for each in group], list(range(len(group)))
    prompt = write_prompt(attempts, order=order, tools=group[0].tools, instructions=RUBRIC, seed=str(seed))
    record = prompt.messages[1]["content"]
    expected = judge_server.read_record(record)
    found = read_attempts(record)
    assert sorted(found) == sorted(prompt.ids)
    for name, conversations in expected.attempts.items():
        main = next(messages for label, messages in reversed(conversations) if label == "main")
        assert [(role, text.split()) for role, text in found[name]] == [
            (message.role.split(" ")[0], message.text.split())
            for message in main
            if message.role.split(" ")[0] != "cut"
        ]
    assert set(parse_verdict(answer(prompt.messages)[0], prompt.ids)) == set(prompt.ids)


@pytest.mark.parametrize(
    "said",
    ["rule: +1 if user 1 has 'Book'", "x\nrule: +1 if user 1 has 'Book'\n", '{"scores": []}', "<1 end>\nrule: +1"],
)
def test_no_text_of_an_attempt_is_a_rule(said: str) -> None:
    assert [each.reward for each in judge(flights((said, said), ("flight 1", "1")))] == [0.0, 1.0]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "rule: lots if user 1 has 'a'",
        "rule: +1",
        "rule: +1 if user 0 has 'a'",
        "rule: +1 if user has 'a'",
        "rule: +1 if robot 1 has 'a'",
        "rule: +1 if user 1 has a",
        "rule: +1 if user 1 has 'a' and",
        "rule: +1 if user 1 has 'a' or user 1 has 'b'",
        "rule: +1 if user 1 has ''",
        "rule: nan if user 1 has 'a'",
        "rule: +1 if user 1 has 'a' and " * 2000,
    ],
)
def test_a_rubric_without_rules_or_with_a_wrong_one_is_refused_in_one_line(line: str) -> None:
    with pytest.raises(RuleError):
        read_rules(f"Be strict.\n{line}")
    with pytest.raises(UsageError, match=r"^judge\.rubric: builtin:rule: .+$"):
        judge(flights(("", "")), f"Be strict.\n{line}")


def test_ruler_s_own_instructions_hold_no_rule() -> None:
    with pytest.raises(RuleError, match="no line of the rubric begins"):
        read_rules(read_instructions(RulerJudgeConfig(name="ruler"), Path(".")))


@pytest.mark.parametrize(
    ("condition", "is_met"),
    [
        ('user 1 has "a {x} c"', True),
        ('user 1 has "a {x} d"', False),
        ('user 1 has "{x} b {x}"', False),
        ('user 2 has "{x} b {x}"', True),
        ('user -1 has "b" and user 1 has "b"', True),
        ('user 3 lacks "b"', True),
        ('user 3 has "b"', False),
        ('user 1 has "{x} b" and user 2 has "{x}"', True),
        ('user 1 has "b {x}" and user 2 has "{x}"', False),
        ('user 1 has "(b|.*"', False),
        ('assistant 1 lacks "b"', True),
        ('tool 1 is "b"', True),
        ('user 1 is "a {x} c"', True),
        ('user 1 is "a {x}"', False),
    ],
)
def test_a_condition(condition: str, is_met: bool) -> None:
    [rule] = read_rules(f"rule: 1 if {condition}")
    assert holds(rule, [("user", "a b c"), ("user", "a b a"), ("tool", "b")]) is is_met


@pytest.mark.parametrize("word", ["14:30", "3.5", "ann@b.org", "2026-11-27", "1,200", "O'Hare", "a", "x" * 100])
def test_a_word_may_hold_punctuation_and_ends_before_it(word: str) -> None:
    """A word matches inside a sentence, at the end, in quotes, and before the condition's remaining text."""
    [rule] = read_rules('rule: 1 if user 1 has "at {time}" and assistant -1 is "{time}"')
    for text in (f"booked at {word} today", f"booked at {word}.", f'booked "at {word}"', f"at {word}: ok"):
        assert holds(rule, [("user", text), ("assistant", word)]), text
        assert not holds(rule, [("user", text), ("assistant", f"{word}0")])
    [before] = read_rules('rule: 1 if user 1 has "at {time}: ok" and assistant -1 has "{time}!"')
    assert holds(before, [("user", f"at {word}: ok"), ("assistant", f"{word}!")])


@pytest.mark.parametrize(("num", "is_warned"), [(2, False), (5, True)])
def test_a_rule_that_never_held_is_logged(num: int, is_warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Rules 1 and 2 hold of some attempts; `art check`, with two attempts, says nothing."""
    judge(flights(*[("flight 12", f"Booked 12, {number}.") for number in range(num)]))
    assert ("builtin:rule: rule 3 of 3 never held in 5 attempts" in caplog.text) == is_warned


def test_no_text_makes_a_rule_slow() -> None:
    [rule] = read_rules('rule: 1 if user 1 has "{a} {b} {c}: {a}."')
    assert isinstance(rule, Rule)
    assert not holds(rule, [("user", "a" * 50_000)]) and not holds(rule, [("user", "a " * 20_000)])
    assert not holds(rule, [("user", "a:" * 25_000)]) and not holds(rule, [("user", "a: " * 15_000)])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "builtin:rules"}, "the only built-in judge model is builtin:rule"),
        ({"model": "builtin:rule", "base_url": "http://127.0.0.1:1/v1"}, "remove base_url"),
        ({"model": "builtin:rule", "params": {"temperature": 0}}, "remove params"),
    ],
)
def test_a_key_that_a_rule_does_not_use_is_an_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RulerJudgeConfig(**{"name": "ruler", **settings})
