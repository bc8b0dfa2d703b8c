"""Rows that benchmarks keep in results/*.jsonl, because they take hours: a run that has a row is not run again."""

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of the file, or none if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
