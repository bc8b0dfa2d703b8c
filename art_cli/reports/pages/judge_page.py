"""The judge's report as one self-contained HTML page with plots: agreement with the gold, order bias, rewards, spread.

Takes the report as plain data (what `art judge --report --json` prints) and the points of its plots; returns text.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from art_cli.reports.pages.plots import Point, axis, histogram, scatter


def judge_page(report: Mapping[str, Any], sample: Mapping[str, Any], lines: Sequence[tuple[str, str]]) -> str:
    """The page. `lines` are the report's (name, value) lines, as the terminal shows them."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in lines)
    title = f"Judge report: {report['path']}"
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>"
        f"<style>\n{style}</style></head><body><h1>{escape(title)}</h1>"
        f"<table>{rows}</table>{''.join(_plots(report, sample))}</body></html>\n"
    )


def _plots(report: Mapping[str, Any], sample: Mapping[str, Any]) -> list[str]:
    """A plot for each kind of points that `sample` has."""
    plots = []
    if positions := [(float(x), float(y)) for x, y in sample["positions"]]:
        plots.append(_order_plot(positions, report["judges"][0]["order_bias"]))
    if gold := [(float(x), float(y)) for x, y in sample["gold"]]:
        x = axis([point[0] for point in gold], str(report["gold"]))
        plots.append(scatter("Reward against gold", gold, x, axis([], "reward", low=0.0, high=1.0)))
    if rewards := sample["rewards"]:
        x = axis(rewards, "reward", low=min(0.0, *rewards), high=max(1.0, *rewards))
        plots.append(histogram("Rewards", rewards, x))
    if spreads := sample["spreads"]:
        plots.append(
            histogram("Spread of the votes on one attempt", spreads, axis(spreads, "standard deviation", low=0.0))
        )
    return plots


def _order_plot(points: Sequence[Point], bias: Mapping[str, Any] | None) -> str:
    """Votes by position in the prompt. The line falls by the order bias from the first position to the last."""
    y = axis([point[1] for point in points], "vote less its mean")
    value = float(bias["value"]) if bias else 0.0
    line = ((0.0, value / 2), (1.0, -value / 2))
    return scatter("Score by place in the prompt", points, axis([], "place: first to last", low=0.0, high=1.0), y, line)
