"""Answers that a scorer evaluates as Python are plain arithmetic or plain lists, or the scorer never sees them."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

from art_cli.rollouts.environments import Settings, open_environment
from art_cli.rollouts.environments.reasoning_gym import (
    Generator,
    is_harmless_expression,
    is_harmless_fraction,
    is_harmless_literal,
)

ATTACKS = [
    "__import__('pathlib').Path({path!r}).touch()",
    "[].__class__.__base__.__subclasses__()",
    "(lambda: 1)()",
    "[x for x in (1,)]",
    "open({path!r}, 'w')",
    "'a' * 10**9",
    'sqrt(\'__import__("os").system("touch {path}")\')',
    "9**9**9**9",
    "((9**60)**60)**60",
    "2**(9*9*9)",
    "factorial(10**9)",
    "exp(10**9)",
    "exp(10**9*E)",
    "cosh(10**9)",
    "exp(exp(exp(exp(3.1))))",
    "exp(x*exp(10**9))",
    "(" * 4000,
]


def evaluating() -> set[str]:
    """The generators in whose modules a call of eval, exec or parse_expr has an argument that is named `answer`."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (dataset, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(sys.modules[dataset.__module__]))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            names = {each.id for argument in call.args for each in ast.walk(argument) if isinstance(each, ast.Name)}
            if called in ("eval", "exec", "parse_expr", "sympify") and "answer" in names:
                found.add(name)
    return found


def opened(name: str) -> Generator:
    generator = open_environment(Settings(f"reasoning_gym/{name}"))
    assert isinstance(generator, Generator)
    return generator


@pytest.mark.slow
def test_an_attack_is_scored_as_an_empty_answer_and_a_right_answer_keeps_its_score(tmp_path: Path) -> None:
    names = sorted(evaluating())
    assert names
    for name in names:
        generator = opened(name)
        dataset, entry = generator.entry(3)
        for attack in ATTACKS:
            text = attack.format(path=str(tmp_path / "touched"))
            assert generator._score(dataset, entry, text) == dataset.score_answer("", entry), (name, text)
        assert not any(tmp_path.iterdir()), name
        for seed in range(3):
            dataset, entry = generator.entry(seed)
            right = entry["answer"]
            assert generator._score(dataset, entry, right) == dataset.score_answer(right, entry) == 1, name


@pytest.mark.parametrize("text", ["(1 + 2) * 3 / 4", "x**2/2 + C", "3*x**3 - sin(2*x)*exp(-x)", "sqrt(x**2 + 1)", "-5",
                                  "exp(2)", "exp(-9*x**2 + 100)", "sqrt(10**9)"])  # fmt: skip
def test_arithmetic_is_harmless(text: str) -> None:
    assert is_harmless_expression(text)


@pytest.mark.parametrize("text", ["[['Q', '_'], ['_', 'Q']]", "[1, -2]", "0 1\n1 0", "ABCDE", "I do not know", ""])
def test_lists_and_what_does_not_parse_are_harmless_to_eval(text: str) -> None:
    assert is_harmless_literal(text)


def test_a_fraction_with_an_endless_power_of_ten_is_not_scored() -> None:
    generator = opened("coin_flip")
    dataset, entry = generator.entry(3)
    for text in ("1e9999999999", "1E+9_999_999_999", "1e٩٩٩٩٩٩٩٩٩٩"):
        assert not is_harmless_fraction(text)
        assert generator._score(dataset, entry, text) == dataset.score_answer("", entry)
    assert is_harmless_fraction("3/8") and is_harmless_fraction("1.5e-3")
    assert generator._score(dataset, entry, entry["answer"]) == 1
