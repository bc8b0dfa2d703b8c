"""A judge's report as a self-contained HTML page: gold agreement, order bias, rewards, spread.

Input is the report as plain data (`art judge --report --json`) and the plots' points; output is text. Plots are SVG,
and all texts are escaped.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from art_cli.reports.pages.report_page import facts_table, html_page

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 40
BARS = 20

Point = tuple[float, float]


class Axis(NamedTuple):
    """A range with a name. Example: Axis(0.0, 1.0, "place in the prompt")"""

    low: float
    high: float
    name: str

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def axis(values: Sequence[float], name: str, *, low: float | None = None, high: float | None = None) -> Axis:
    """Returns a range of positive length that includes all values; `low` and `high` override its ends."""
    bottom = min(values, default=0.0) if low is None else low
    top = max(values, default=1.0) if high is None else high
    return Axis(bottom, top if top > bottom else bottom + max(1.0, abs(bottom)), name)


def scatter(title: str, points: Sequence[Point], x: Axis, y: Axis, line: tuple[Point, Point] | None = None) -> str:
    """Returns a plot of points, optionally with a straight line."""
    dots = "".join(f'<circle cx="{_x(x, a):.1f}" cy="{_y(y, b):.1f}" r="2"/>' for a, b in points)
    body = f'<g class="dots">{dots}</g>'
    if line is not None:
        (a, b), (c, d) = line
        ends = f'x1="{_x(x, a):.1f}" y1="{_y(y, b):.1f}" x2="{_x(x, c):.1f}" y2="{_y(y, d):.1f}"'
        body += f'<line class="fit" {ends}/>'
    return _frame(title, x, y, body)


def histogram(title: str, values: Sequence[float], x: Axis) -> str:
    """Returns a histogram with 20 bars."""
    counts = [0] * BARS
    for value in values:
        counts[min(BARS - 1, max(0, math.floor(x.share(value) * BARS)))] += 1
    y = Axis(0.0, max(1, *counts), "count")
    step = (WIDTH - LEFT - RIGHT) / BARS
    bars = "".join(
        f'<rect x="{LEFT + place * step + 1:.1f}" y="{_y(y, count):.1f}" width="{step - 2:.1f}" '
        f'height="{HEIGHT - BOTTOM - _y(y, count):.1f}"/>'
        for place, count in enumerate(counts)
        if count
    )
    return _frame(title, x, y, f'<g class="bars">{bars}</g>')


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - BOTTOM - TOP)


def _frame(title: str, x: Axis, y: Axis, body: str) -> str:
    """Adds a title and axes with ranges and names."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    turned = f'transform="translate(12 {(TOP + bottom) / 2}) rotate(-90)"'
    texts = [
        f'<text x="{WIDTH / 2}" y="16" text-anchor="middle" class="title">{escape(title)}</text>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.name)}</text>',
        f'<text {turned} text-anchor="middle">{escape(y.name)}</text>',
        f'<text x="{LEFT}" y="{bottom + 14}" text-anchor="middle">{x.low:.3g}</text>',
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{x.high:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end">{y.low:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{y.high:.3g}</text>',
    ]
    axes = f'<path class="axes" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {view} role="img" aria-label="{escape(title)}">{axes}{body}{"".join(texts)}</svg>'


def judge_page(report: Mapping[str, Any], sample: Mapping[str, Any], lines: Sequence[tuple[str, str]]) -> str:
    """Returns the page. `lines` are the report's (name, value) lines from the terminal."""
    return html_page(f"Judge report: {report['path']}", [facts_table(lines), *_plots(report, sample)])


def _reward_axis(rewards: Sequence[float]) -> Axis:
    return axis(rewards, "reward", low=min(0.0, *rewards), high=max(1.0, *rewards))


def _plots(report: Mapping[str, Any], sample: Mapping[str, Any]) -> list[str]:
    """Returns a plot for each kind of points in `sample`."""
    plots = []
    if positions := [(float(x), float(y)) for x, y in sample["positions"]]:
        plots.append(_order_plot(positions, report["judges"][0]["order_bias"]))
    if gold := [(float(x), float(y)) for x, y in sample["gold"]]:
        x = axis([point[0] for point in gold], str(report["gold"]))
        plots.append(scatter("Reward against gold", gold, x, _reward_axis([point[1] for point in gold])))
    if rewards := sample["rewards"]:
        plots.append(histogram("Rewards", rewards, _reward_axis(rewards)))
    if spreads := sample["spreads"]:
        plots.append(
            histogram("Spread of the votes on one attempt", spreads, axis(spreads, "standard deviation", low=0.0))
        )
    return plots


def _order_plot(points: Sequence[Point], bias: Mapping[str, Any] | None) -> str:
    """Plots votes by prompt position. The line shows the order bias between the two ends."""
    y = axis([point[1] for point in points], "vote less its mean")
    value = float(bias["value"]) if bias else 0.0
    line = ((0.0, value / 2), (1.0, -value / 2))
    return scatter("Score by place in the prompt", points, axis([], "place: first to last", low=0.0, high=1.0), y, line)
