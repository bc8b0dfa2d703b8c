"""Values by step as a standalone SVG picture, for example a run's learning curve.

Plain data in, text out. `art train` writes the learning curve at the end; the run's report has a picture per metric.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from art_cli.runs.history import History

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 150, 34, 40
COLOURS = ("#2f6fdb", "#d1472f", "#2b8a57", "#8250c4", "#b07d12")

Point = tuple[float, float]
Place = Callable[[Point], str]  # (x, y) in the data -> "x,y" in the picture


class Series(NamedTuple):
    """A line in the picture. Example: Series("eval win", [(0, 0.41), (10, 0.63)], has_dots=True)"""

    name: str
    points: list[Point]
    has_dots: bool
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high): interval around the line


def run_series(history: History, *, metrics: Sequence[str], rewards: Mapping[str, str]) -> list[Series]:
    """Returns the training reward and evaluation metrics with values. `rewards` has the names of `reward_names`."""
    name = "reward_mean"  # missing if every attempt of a step failed
    train = [(float(u.number - 1), u.metrics[name]) for u in history.updates if name in u.metrics]
    said = rewards["train"]
    series = [Series("training reward" if said == "reward" else f"training: {said}", train, has_dots=False)]
    for name in metrics:
        points = [(float(e.step), e.metrics[name]) for e in history.evaluations if name in e.metrics]
        said = rewards["eval"] if name == "reward" else name
        title = f"evaluation: {said}" if said == name else f"eval: {said}"  # short, because the legend is narrow
        series.append(Series(title, points, has_dots=True))
    return [one for one in series if one.points]


def curve(
    title: str,
    series: Sequence[Series],
    *,
    covers: tuple[float, ...] = (0.0, 1.0),
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> str:
    """Returns the picture. The vertical axis includes all values and `covers`. Without series, the frame is empty.

    Only named series appear in the legend, which takes space at the right.
    """
    (width, height), margin = size, RIGHT if any(one.name for one in series) else 16
    points = [point for one in series for point in one.points]
    right = max((x for x, _ in points), default=1.0) or 1.0
    ys = [*covers, *(y for _, y in points), *(y for one in series for _, *ends in one.band for y in ends)]
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    high = high if high > low else low + 1.0

    def place(point: Point) -> str:
        x = LEFT + point[0] / right * (width - LEFT - margin)
        y = height - BOTTOM - (point[1] - low) / (high - low) * (height - BOTTOM - TOP)
        return f"{x:.1f},{y:.1f}"

    ticks = "".join(_tick(low + (high - low) * part / 4, place, right) for part in range(5))
    drawn = "".join(_line(one, COLOURS[i % len(COLOURS)], place, i) for i, one in enumerate(series))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="#4a5365">'
        f'<rect class="paper" width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="{LEFT}" y="20" font-size="14" font-weight="600" fill="#1c2330">{escape(title)}</text>'
        f"{ticks}{drawn}"
        f'<text x="{LEFT}" y="{height - 12}">step 0</text>'
        f'<text x="{width - margin}" y="{height - 12}" text-anchor="end">step {right:g}</text></svg>\n'
    )


def _tick(value: float, place: Place, right: float) -> str:
    (x, y), (end, _) = (place((at, value)).split(",") for at in (0.0, right))
    return (
        f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" class="grid" stroke="#e3e6ec"/>'
        f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{value:.2g}</text>'
    )


def _line(series: Series, colour: str, place: Place, row: int) -> str:
    """Returns a series as a line, with a legend entry."""
    placed = [place(point) for point in series.points]
    width = "2" if series.has_dots else "1.2"
    edge = [place((x, low)) for x, low, _ in series.band] + [place((x, high)) for x, _, high in series.band[::-1]]
    band = f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity=".15"/>' if edge else ""
    dots = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*point.split(","), colour)
        for point in placed
        if series.has_dots
    )
    y = TOP + 14 + 20 * row
    legend = (
        f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{WIDTH - RIGHT + 28}" y="{y + 1}">{escape(series.name)}</text>'
    )
    path = f'<polyline points="{" ".join(placed)}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    return band + path + dots + (legend if series.name else "")
