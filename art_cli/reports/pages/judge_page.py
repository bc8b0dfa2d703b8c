"""The judge's report as one self-contained HTML page with plots: agreement with the gold, order bias, rewards, spread.

Takes the report as plain data (what `art judge --report --json` prints) and the points of its plots; returns text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from art_cli.reports.pages.plots import Point, axis, histogram, scatter
from art_cli.reports.pages.report_page import facts_table, html_page


def judge_page(report: Mapping[str, Any], sample: Mapping[str, Any], lines: Sequence[tuple[str, str]]) -> str:
    """Returns the page. `lines` are the report's (name, value) lines, as the terminal shows them."""
    return html_page(f"Judge report: {report['path']}", [facts_table(lines), *_plots(report, sample)])


def _plots(report: Mapping[str, Any], sample: Mapping[str, Any]) -> list[str]:
    """Returns a plot for each kind of points that `sample` has."""
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
