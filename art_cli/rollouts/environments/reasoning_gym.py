"""reasoning-gym: puzzle generators, each with a scorer (github.com/open-thought/reasoning-gym).

A scenario's seed selects the first entry of the generator's dataset with this seed. The policy answers in one turn. The
scorer gets the text in the last <answer>...</answer>, or the whole reply. If an answer makes the scorer fail, its score
is 0 and the metric `malformed` counts it, unless the generator's correct answer makes the scorer fail too.

Some scorers call `eval`, or SymPy's `parse_expr` which uses `eval`. A model can write any answer, such as a call of
`os.system`, or `9**9**9**9`, which fills the memory. These scorers only get answers whose syntax tree is harmless.

The library's arguments `size` and `seed` are `rollout.environment.size` and `.seed`.
"""

import ast
import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from art_cli.rollouts.environments import (
    EnvironmentFault,
    Json,
    Listing,
    Settings,
    check_args,
    finite,
    plain_defaults,
    seed_of,
    unknown,
    with_tuples,
)
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import describe, first_sentence
from art_cli.runtime.worker_pool import Crowded, Overran, WorkerPool

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy

MAX_LENGTH = 4000  # characters; the longest right answer of the nine generators has fewer than 500
MAX_NODES = 400  # maximum nodes of an expression's syntax tree
MAX_EXPONENT_DIGITS = 3
MAX_EXPONENT = 64  # the largest exponent, and the largest product of exponents of exponents
FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
    }
)
GROWING = frozenset({"exp", "sinh", "cosh"})
NUMBERS = frozenset({"pi", "E", "I", "oo", "zoo", "nan", "GoldenRatio", "TribonacciConstant", "EulerGamma", "Catalan"})
LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)
SYSTEM = "Think as long as it helps. Then write the final answer, and nothing else, between <answer> and </answer>."
CALL_S = 60.0  # longest time to generate a puzzle, or to score an answer
WAIT_S = 600.0  # longest wait for the worker thread
NUM_KEPT = 256  # puzzles cached per process; the attempts of a group share a puzzle
EVALUATED = re.compile(r"\beval\(\s*answer\b")
PARSED = re.compile(r"\bparse_expr\(\s*answer\b")
FRACTION = re.compile(r"\bFraction\(\s*answer\b")


def is_harmless_literal(text: str) -> bool:
    """Returns whether `eval` can only build lists of numbers, strings and names from the text, or fail to parse it."""
    if len(text) > MAX_LENGTH:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False
    return all(isinstance(node, LITERALS) for node in ast.walk(tree))


def is_harmless_fraction(text: str) -> bool:
    """Returns whether the powers of ten in the text are small enough to be written out as a whole number."""
    exponents = re.findall(r"[eE][+-]?([\d_]+)", text)
    return len(text) <= MAX_LENGTH and all(len(digits) <= MAX_EXPONENT_DIGITS for digits in exponents)


def is_harmless_expression(text: str) -> bool:
    """Returns whether the text is a small arithmetic expression. SymPy rewrites invalid syntax, so it is refused."""
    if len(text) > MAX_LENGTH:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
        num_nodes = sum(1 for _ in ast.walk(tree))
        return num_nodes <= MAX_NODES and _is_expression(tree.body) and _degree(tree) <= MAX_EXPONENT
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_expression(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return "_" not in name
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, OPERATORS) and _is_expression(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, OPERATORS) and _is_expression(left) and _is_expression(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            is_known = name in FUNCTIONS and all(map(_is_expression, args))
            return is_known and (name not in GROWING or all(map(_stays_small, args)))
    return False


def _stays_small(node: ast.expr) -> bool:
    """Returns whether the expression's exponential functions have representable values or none at all."""
    inside = list(ast.walk(node))
    has_symbol = any(isinstance(each, ast.Name) and each.id not in FUNCTIONS | NUMBERS for each in inside)
    is_nested = any(isinstance(each, ast.Name) and each.id in GROWING for each in inside)
    return _bound(node) <= MAX_EXPONENT or (has_symbol and not is_nested)


def _degree(node: ast.AST) -> float:
    """Returns a bound of the largest power in an expression, where powers of powers multiply. It is 1 without any."""
    degree = max(map(_degree, ast.iter_child_nodes(node)), default=1.0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return degree * max(1.0, _bound(node.right))
    return degree


def _bound(node: ast.expr) -> float:
    """Returns an upper bound for an exponent's magnitude; symbols count as 1, and unusual expressions as infinite."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value) if abs(value) <= MAX_EXPONENT else math.inf
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _bound(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _bound(left) + _bound(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bound(left) * _bound(right)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as divisor)) if divisor >= 1:
            return _bound(left)
    return math.inf


class ReasoningGym:
    """The library. Environment names are generator names."""

    package, extra = "reasoning_gym", "reasoning-gym"
    takes_one_turn, makes_scenarios = True, True
    about = "puzzles of mathematics, logic, games and language by seed, one turn each"

    def listed(self) -> Iterator[Listing]:
        for name, (dataset, _) in sorted(_generators().items()):
            yield Listing(name, first_sentence(vars(dataset).get("__doc__") or "") or name.replace("_", " "))

    def defaults(self, name: str) -> Json:
        if name not in _generators():
            known = [f"reasoning_gym/{each}" for each in _generators()]
            raise unknown("rollout.environment.name", f"reasoning_gym/{name}", known)
        values = _fields(_generators()[name][1]())
        return {name: value for name, value in plain_defaults(values).items() if name not in ("seed", "size")}

    def open(self, name: str, settings: Settings) -> "Generator":
        check_args(settings, self.defaults(name))
        generator = Generator(name, settings)
        generator.entry(0)
        return generator


def _generators() -> dict[str, tuple[Any, Any]]:
    """Maps names to (dataset class, configuration class). "composite" combines generators and has no puzzles."""
    from reasoning_gym.factory import DATASETS

    return {name: made for name, made in DATASETS.items() if name != "composite"}


def _fields(config: Any) -> Json:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


class Generator:
    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._system = SYSTEM if settings.system is None else settings.system
        self._dataset_class, self._config_class = _generators()[name]
        self._args = with_tuples(settings.args, _fields(self._config_class()))
        self._may_score = _guard(self._dataset_class)
        self._workers = WorkerPool(size=1, wait_s=WAIT_S, run_s=CALL_S)
        self.entry = lru_cache(NUM_KEPT)(self._entry)

    async def play(self, policy: "Policy", scenario: Json) -> Outcome:
        dataset, entry = await self._call("a puzzle", self.entry, seed_of(scenario))
        messages: Any = [{"role": "user", "content": entry["question"]}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        answer = read_answer(reply.choices[0].message.content or "")
        score = await self._call("the score of an answer", self._score, dataset, entry, answer)
        metrics = {"solved": float(score == 1.0), "malformed": float(score is None)}
        return Outcome(reward=score or 0.0, metrics=metrics, metadata={"answer": answer, "right": str(entry["answer"])})

    async def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._workers.call(function, *arguments)
        except (Overran, Crowded) as error:
            raise EnvironmentFault(f"reasoning_gym/{self._name}: {what} took more than {CALL_S:.0f} s") from error

    def _entry(self, seed: int) -> tuple[Any, Json]:
        """Returns (dataset, entry 0) for the seed."""
        config = self._config_class(**self._args, seed=seed, size=1)
        if hasattr(config, "validate"):
            config.validate()
        dataset = self._dataset_class(config=config)
        return dataset, dataset[0]

    def _score(self, dataset: Any, entry: Json, answer: str) -> float | None:
        """Returns the score, None if the answer breaks the scorer. Raises EnvironmentFault if the right one does."""
        try:
            return finite(float(dataset.score_answer(answer if self._may_score(answer) else "", entry)), "the score")
        except Exception as error:  # the boundary to the library
            try:
                finite(float(dataset.score_answer(entry["answer"], entry)), "the score")
            except Exception:
                raise EnvironmentFault(f"reasoning_gym/{self._name}: its scorer raised {describe(error)}") from error
            return None


def read_answer(reply: str) -> str:
    """Returns a reply's answer: the text in the last answer tags, or all text after the thoughts."""
    said = reply.rpartition("</think>")[2]
    before, closing, _ = said.rpartition("</answer>")
    if closing and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip()
    return said.strip()


def _guard(dataset: type) -> Callable[[str], bool]:
    """Returns a predicate for answers that are safe to score, because the scorer may evaluate them as Python."""
    source = inspect.getsource(sys.modules[dataset.__module__])
    if PARSED.search(source):
        return is_harmless_expression
    if FRACTION.search(source):
        return is_harmless_fraction
    return is_harmless_literal if EVALUATED.search(source) else lambda answer: True
