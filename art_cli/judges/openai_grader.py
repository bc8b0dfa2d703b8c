"""OpenAIGrader: runs a grader from OpenAI's reinforcement fine-tuning (JSON) as a judge.

    judge: {entry: "art_cli.judges.openai_grader:OpenAIGrader", options: {grader: {type: string_check, ...}}}

Templates can use `item` (the scenario) and `sample` (the last reply). `python` graders run in this process.
"""

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from art_cli.judges import Judge, Verdict
from art_cli.runs.trajectory import Json, Score, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError
from art_cli.runtime.threads import call_in_thread

KINDS = "string_check (eq, ne, like, ilike), text_similarity (rouge_1 to rouge_5, rouge_l), python, multi of these"
Grade = Callable[[Json, Json], Any]  # grade(sample, item), the signature of OpenAI's python graders
OPERATORS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "Pow": operator.pow,
}
FUNCTIONS = {each.__name__: each for each in (min, max, abs, math.floor, math.ceil, math.exp, math.sqrt, math.log)}


class NotInSample(Exception):
    """The reply lacks a value named in a template, for example a tool call."""


class OpenAIGrader(Judge):
    def __init__(self, grader: Json) -> None:
        """Raises UsageError for unsupported graders or formulas."""
        is_multi = grader.get("type") == "multi"
        parts = grader["graders"] if is_multi else {"grade": grader}
        self._formula = grader["calculate_output"] if is_multi else "grade"
        self._graders = {name: read_grader(name, part) for name, part in parts.items()}
        with suppress(ArithmeticError, ValueError):  # may fail only for some grades
            calculate(self._formula, dict.fromkeys(parts, 1.0))

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        return await call_in_thread(lambda: {each.id: self._verdict(each) for each in group})

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        sample, grades = sample_of(trajectory), dict.fromkeys(self._graders, 0.0)
        for name, grade in self._graders.items():
            with suppress(NotInSample):  # the policy's mistake: grade 0
                grades[name] = float(grade(sample, trajectory.scenario))
        scores = [Score(judge=name, score=grade) for name, grade in grades.items()]
        return Verdict(reward=calculate(self._formula, grades), scores=scores)


def read_grader(name: str, grader: Json) -> Grade:
    """Compiles a grader to a function. Raises UsageError for unsupported types and metrics."""
    kind, metric = grader.get("type"), grader.get("operation") or grader.get("evaluation_metric")
    if compare := COMPARISONS.get((kind, metric)):
        text, reference = grader["input"], grader["reference"]
        return lambda sample, item: compare(fill(text, sample, item), fill(reference, sample, item))
    if kind == "python":
        names: Json = {}
        exec(compile(grader["source"], f"{name}.source", "exec"), names)  # user code from the configuration
        grade: Grade = names["grade"]
        return grade
    cure = "use RULER with the prompt as its rubric" if kind in ("score_model", "label_model") else f"there is {KINDS}"
    raise UsageError(f"judge.options.grader: no {kind} {metric or ''} ({name}): {cure}")


def sample_of(trajectory: Trajectory) -> Json:
    """Returns the last reply in the format of OpenAI's `sample`."""
    last: Json = next((each for each in reversed(trajectory.messages) if each.get("role") == "assistant"), {})
    text, parsed = last.get("content") or "", None
    with suppress(ValueError, RecursionError):
        parsed = json.loads(text)
    found = {"output_text": text, "output_json": parsed, "output_tools": last.get("tool_calls") or []}
    return found | {"choices": [{"index": 0, "message": last}]}


def fill(template: str, sample: Json, item: Json) -> str:
    """Substitutes {{item.path}} and {{sample.path}} in the template. Values other than strings become JSON."""

    def value(match: re.Match[str]) -> str:
        here: Any = {"sample": sample, "item": item}
        for key in re.findall(r"[^.\[\]'\"]+", match[1]):
            try:
                here = here[int(key) if isinstance(here, list) else key]
            except (LookupError, TypeError, ValueError):
                if match[1].startswith("sample."):
                    raise NotInSample from None
                raise JudgeError(f"{match[0]}: the scenario has no such value") from None
        return here if isinstance(here, str) else json.dumps(here, ensure_ascii=False)

    return re.sub(r"\{\{\s*(.*?)\s*\}\}", value, template)


def rouge(order: int, text: str, reference: str) -> float:
    """Returns the n-gram F1 score (Lin 2004) of two texts. Order 0 uses the longest common subsequence."""
    ours, theirs = (re.findall(r"[a-z0-9]+", each.lower()) for each in (text, reference))
    if order:
        grams = [Counter(zip(*(each[start:] for start in range(order)), strict=False)) for each in (ours, theirs)]
        common, total = (grams[0] & grams[1]).total(), grams[0].total() + grams[1].total()
        return 2 * common / total if common else 0.0
    lengths = [0] * (len(theirs) + 1)  # entry i: longest common subsequence with theirs[:i]
    for word in ours:
        before = 0
        for i, other in enumerate(theirs, 1):
            before, lengths[i] = lengths[i], before + 1 if word == other else max(lengths[i - 1 : i + 1])
    return 2 * lengths[-1] / (len(ours) + len(theirs)) if lengths[-1] else 0.0


COMPARISONS: dict[Any, Callable[[str, str], float]] = {  # (type, metric) -> function of input and reference
    ("string_check", "eq"): operator.eq,
    ("string_check", "ne"): operator.ne,
    ("string_check", "like"): operator.contains,
    ("string_check", "ilike"): lambda text, reference: reference.lower() in text.lower(),
    **{("text_similarity", f"rouge_{order or 'l'}"): partial(rouge, order) for order in range(6)},
}


def calculate(formula: str, grades: Mapping[str, float]) -> float:
    """Evaluates the formula. Raises UsageError unless it uses only numbers, graders, + - * / ^ and FUNCTIONS."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name) if name in grades:
                return grades[name]
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op).__name__ in OPERATORS:
                return float(OPERATORS[type(op).__name__](value(left), value(right)))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return float(FUNCTIONS[name](*map(value, args)))
        raise UsageError(f"judge.options.grader.calculate_output: {ast.unparse(node)!r} cannot be calculated")

    return value(ast.parse(formula.replace("^", "**"), mode="eval").body)
