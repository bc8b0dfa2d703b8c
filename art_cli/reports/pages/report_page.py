"""A run's report as a self-contained HTML page: results, plots over steps, findings and cures.

Input is the report as plain data (`art report --json`); output is text. All texts are escaped and the page loads
nothing, because a run's files may come from anyone.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from art_cli.reports.pages.curve import Series, curve
from art_cli.reports.pages.report_text import KINDS, NAMES, cures, evaluation_rows, facts, judge_rows, span, state
from art_cli.runtime.errors import printable

SHARES = ("no_signal_share", "clip_fraction", "failed_share", "limited_share")  # plotted from 0 to 1
SMALL = (440, 240)  # width and height of small pictures
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Report = Mapping[str, Any]


def report_page(report: Report) -> str:
    parts = [f"<p>{_text(state(report))}</p>", facts_table(facts(report)), _findings(report["findings"])]
    parts += [_rewards(report), _evaluations(report), _judges(report), *_plots(report["series"])]
    return html_page(f"Report of {report['run']}", parts)


def html_page(title: str, parts: Sequence[str]) -> str:
    """Returns a self-contained page of HTML parts below a title. The page cannot load anything."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f"<style>\n{style}</style></head><body><h1>{_text(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(printable(value))


def facts_table(lines: Sequence[tuple[str, object]]) -> str:
    rows = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in lines)
    return f"<table>{rows}</table>"


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return "<h2>What went wrong</h2><p>Nothing that the numbers show.</p>"
    return f"<h2>What went wrong, and what to try</h2><ul>{''.join(map(_finding, findings))}</ul>"


def _finding(finding: Mapping[str, Any]) -> str:
    kind = KINDS[finding["kind"]]
    lines = [f"next to it: {reason['text']}" for reason in finding["reasons"]]
    lines += [f"try: {cure}" for cure in cures(finding)]
    inner = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<li><b>step {span(finding)}: {_text(kind)}</b>: {_text(finding['text'])}<ul>{inner}</ul></li>"


def _evaluations(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{step}</td><td>{_text(reward)}</td><td>{_text(note)}</td></tr>"
        for step, reward, note in evaluation_rows(report, limit=1000)
    )
    name = _text(report["reward_names"]["eval"])
    head = f"<tr><th>step</th><th>{name}, 95 % interval</th><th></th></tr>"
    return f"<h2>Evaluations</h2><table>{head}{rows}</table>" if rows else ""


def _judges(report: Report) -> str:
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in judge_rows(report))
    return f"<h2>The judge by steps</h2><table>{rows}</table>" if rows else ""


def _rewards(report: Report) -> str:
    measured = [each["reward"] for each in report["evaluations"] if each["reward"] is not None]
    names = {split: "" if name == "reward" else f": {name}" for split, name in report["reward_names"].items()}
    series = [
        _line(f"training, smoothed{names['train']}", report["training_reward"], has_dots=False),
        _line(f"evaluation{names['eval']}", measured, has_dots=True),
    ]
    shown = [one for one in series if one.points]
    keys = "".join(f'<span class="key colour{i}"></span>{_text(one.name)}' for i, one in enumerate(shown))
    picture = curve("reward by step", [one._replace(name="") for one in shown])
    return f'<h2>Reward</h2><div class="wide">{picture}</div><p>{keys}</p>'


def _line(name: str, points: Sequence[Mapping[str, Any]], *, has_dots: bool) -> Series:
    band = [(float(p["step"]), p["low"], p["high"]) for p in points if p["low"] is not None]
    return Series(name, [(float(p["step"]), p["mean"]) for p in points], has_dots, band)


def _plots(series: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    drawn = [
        curve(
            NAMES.get(name, name),
            [Series("", [(float(x), y) for x, y in points], has_dots=False)],
            covers=(0.0, 1.0) if name in SHARES else (0.0,),
            size=SMALL,
        )
        for name, points in series.items()
        if points and name != "reward"
    ]
    return ["<h2>Training</h2>", '<div class="plots">', *drawn, "</div>"] if drawn else []
