"""Reads the transcripts that sft learns from: a JSON-lines file, or a function that returns them. No torch."""

import json
from collections.abc import Iterable
from pathlib import Path

from art_cli import plugins
from art_cli.errors import DataError, UsageError
from art_cli.trajectory import Json


def load_demos(spec: str, directory: Path) -> list[Json]:
    """Transcripts `{"messages": [...], "tools": [...]}`; relative paths are relative to `directory`.

    Raises DataError with `file:line` for a line that is none, UsageError for a function that returns something else.
    """
    if ":" not in spec:
        return _read(directory / spec)
    made = plugins.resolve(spec, base=directory)()
    if not isinstance(made, Iterable):
        raise UsageError(f"sft.demos: {spec} returned {type(made).__name__}; expected transcripts")
    demos = list(made)
    for number, demo in enumerate(demos):
        if problem := _find_problem(demo):
            raise UsageError(f"sft.demos: {spec}: item {number}: {problem}")
    if not demos:
        raise UsageError(f"sft.demos: {spec} returned no transcript")
    return demos


def _read(path: Path) -> list[Json]:
    demos = []
    if not path.is_file():
        raise DataError("no such file", path)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            demo = json.loads(line)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", path, number) from error
        if problem := _find_problem(demo):
            raise DataError(problem, path, number)
        demos.append(demo)
    if not demos:
        raise DataError("no transcripts in it", path)
    return demos


def _find_problem(demo: object) -> str | None:
    if not isinstance(demo, dict) or not isinstance(demo.get("messages"), list):
        return 'expected an object with "messages"'
    roles = [message.get("role") if isinstance(message, dict) else None for message in demo["messages"]]
    if None in roles:
        return f"message {roles.index(None)} has no role"
    return None if "assistant" in roles else "no assistant message to learn from"
