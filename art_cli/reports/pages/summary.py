"""Summary that `art train` prints at the end of a run: evaluations, checkpoint to serve, and further commands.

Takes the report as plain data (what `art report --json` prints); returns text.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MAX_METRICS = 4  # metrics beside the reward that the table has room for

Report = Mapping[str, Any]


def closing_text(report: Report) -> str:
    """Returns the whole text. What stands in the run's files is in it as it is, so print it with `printable_lines`."""
    run = shlex.quote(str(report["run"]))
    lines = [f"  {line}" for line in evaluation_table(report)]
    if report["offered"]:
        lines += [f"to serve:   {path}" for path in _offered_path(report)]
        lines += [f"            {report['offered']}", f"serve it:   art serve {run}"]
    lines += [f"look at it: art view {run}", f"            art report {run}"]
    return "".join(f"{line}\n" for line in lines)


def _offered_path(report: Report) -> list[str]:
    """Returns the directory of the checkpoint that `art serve RUN` takes, if it is known."""
    kept = [report[name] for name in ("best", "last") if report[name] is not None]
    return [each["checkpoint"] for each in kept if report["offered"].startswith(f"step {each['step']},")][:1]


def evaluation_table(report: Report) -> list[str]:
    """The first, the best and the last evaluation, with the interval of the reward over scenarios and other metrics."""
    done: Sequence[Mapping[str, Any]] = report["evaluations"]
    if not done:
        return []
    rewarded = [each for each in done if each["reward"] is not None]
    best = max(rewarded, key=lambda each: (each["reward"]["mean"], each["step"]), default=None)
    chosen: dict[int, list[str]] = {}
    for name, each in (("first", done[0]), ("best", best), ("last", done[-1])):
        if each is not None:
            chosen.setdefault(each["step"], []).append(name)
    metrics = [name for name in done[-1]["metrics"] if not name.startswith("num_")][:MAX_METRICS]
    rows = [["evaluation", "step", report["reward_names"]["eval"], "95 % interval", *metrics]]
    by_step = {each["step"]: each for each in done}
    for step in sorted(chosen):
        found = [by_step[step]["metrics"].get(name) for name in metrics]
        others = ["" if value is None else f"{value:.3f}" for value in found]
        rows.append([" and ".join(chosen[step]), str(step), *_reward(by_step[step]["reward"]), *others])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _reward(point: Mapping[str, Any] | None) -> tuple[str, str]:
    if point is None:
        return "none", ""
    interval = "" if point["low"] is None else f"{point['low']:.3f} to {point['high']:.3f}"
    return f"{point['mean']:.3f}", interval
