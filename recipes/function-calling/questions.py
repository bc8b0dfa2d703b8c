"""The questions of the Berkeley Function-Calling Leaderboard, as the package bfcl-eval brings them.

`pip install --no-deps bfcl-eval==2026.3.23` (Apache-2.0, 2 MB) is enough: its files are read, none of its code runs.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from art_cli import ArtError

CATEGORIES = ("simple_python", "live_simple", "multiple", "irrelevance")
MAX_ANSWER = 140  # characters of the longest answer as a call, which is about 60 tokens


def data_directory() -> Path:
    """Returns the package's directory of questions. Raises ArtError if it is not installed."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise ArtError("the questions are missing; pip install --no-deps bfcl-eval==2026.3.23")
    return Path(spec.origin).parent / "data"


def read_questions(directory: Path) -> Iterator[dict[str, Any]]:
    """Yields the questions of all categories as scenarios, without those whose answer is too long or missing.

    Example: {"id": "multiple_3", "category": "multiple", "question": "What is ...?", "functions": [{"name": ...}],
    "answer": {"name": "area", "arguments": {"side": [4, "four"], "unit": ["", "cm"]}}}. Each argument has a list of
    right values, in which "" stands for leaving it out. The answer is None where no function fits.
    """
    for category in CATEGORIES:
        answers = directory / "possible_answer" / f"BFCL_v4_{category}.json"
        right = {row["id"]: row["ground_truth"] for row in _rows(answers)} if answers.exists() else {}
        for row in _rows(directory / f"BFCL_v4_{category}.json"):
            scenario = {
                "id": row["id"],
                "category": category,
                "question": "\n".join(message["content"] for message in row["question"][0]),
                "functions": row["function"],
                "answer": _answer(right[row["id"]]) if category != "irrelevance" else None,
            }
            if has_answer(scenario) and is_short(scenario):
                yield scenario


def has_answer(scenario: dict[str, Any]) -> bool:
    """Returns whether a call can be right: a few questions have an argument without any right value."""
    return scenario["answer"] is None or all(scenario["answer"]["arguments"].values())


def is_short(scenario: dict[str, Any]) -> bool:
    """Returns whether a right call fits into a reply. Prompts need no limit: the longest is 506 tokens of SmolLM2."""
    return len(json.dumps(example_call(scenario["answer"]))) <= MAX_ANSWER


def describe(functions: list[dict[str, Any]]) -> str:
    """Returns a line for each function. Example: "area(side: integer, unit?: cm|inch): Area of a square."."""
    return "\n".join(f"{each['name']}({_parameters(each['parameters'])}): {each['description']}" for each in functions)


def example_call(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a right call: the first value of each argument that has to be given."""
    if answer is None:
        return None
    return {"name": answer["name"], "arguments": _first_values(answer["arguments"])}


def _first_values(right: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: _first(values[0]) for name, values in right.items() if "" not in values}


def _first(value: Any) -> Any:
    """Returns a right value as an argument: the right values of a dict are lists again."""
    if isinstance(value, dict):
        return _first_values(value)
    return [_first(each) for each in value] if isinstance(value, list) else value


def _parameters(schema: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}{'' if name in schema['required'] else '?'}: {_kind(value)}"
        for name, value in schema["properties"].items()
    )


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    inner = schema.get("items", {}).get("type")
    return f"{schema['type']} of {inner}" if inner else str(schema["type"])


def _answer(truth: list[dict[str, Any]]) -> dict[str, Any]:
    [(name, arguments)] = truth[0].items()
    return {"name": name, "arguments": arguments}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
