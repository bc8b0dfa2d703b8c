"""`art judge --report`: prints the measures of a scored file's judge, writes the page, checks the gates."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from art_cli.runs.json_lines import decode, lines
from art_cli.runtime.errors import GateError, UsageError, printable


def is_scored(path: Path) -> bool:
    """Whether the first line is a scored trajectory. Raises DataError if the file is not UTF-8 text."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    for line in lines(path):
        with contextlib.suppress(ValueError):
            first = decode(line.data, msgspec.json.Decoder(dict[str, Any]))
            return "reward" in first and "group_size" in first
        return False
    return False


def report(
    path: Path,
    *,
    gold: str | None,
    gates: Sequence[str],
    html: Path | None,
    as_json: bool,
    before: str | dict[str, Any] = "",
    is_whole: bool = True,
) -> None:
    """Prints the report after `before`, the summary of the judging, as text or JSON. Raises GateError.

    While groups stay owed no gate is passed: the hardest ones may be missing.
    """
    from art_cli.judges.report.judge_report import make_report
    from art_cli.judges.report.judge_report_text import report_lines
    from art_cli.loop.gates import parse_gate

    parsed = [parse_gate(gate) for gate in gates]
    measured, sample = make_report(path, gold=gold)
    lines, plain, values = report_lines(measured), msgspec.to_builtins(measured), measured.values()
    if html is not None:
        from art_cli.reports.pages.judge_page import judge_page
        from art_cli.runs.durable import write_file

        write_file(html, judge_page(plain, asdict(sample), lines).encode())
    if as_json:
        summary = before if isinstance(before, dict) else {}
        sys.stdout.write(json.dumps({**summary, "report": plain, "values": values}) + "\n")
    else:
        sys.stdout.write(f"{before}")
        sys.stdout.writelines(printable(f"{name:26s} {value}".rstrip()) + "\n" for name, value in lines)
    for gate in parsed:
        if gate.metric not in values:
            why = "is --gold set?" if gold is None else f"{gold} is equal within every group, or missing"
            raise UsageError(f"--gate: no value {gate.metric!r} ({why}); there are {', '.join(sorted(values))}")
        if not is_whole:
            raise GateError(f"gate missed: {path}: groups stay owed")
        gate.check(values[gate.metric])
