"""The table of learning/curves.py: rollouts to a success rate, success at a number of rollouts, and what was kept.

Reads the rows of benchmarks/results/learning.jsonl; runs nothing.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Curve = Sequence[tuple[int, float, int]]  # rollouts so far, share of successes, games played for it

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t, by df
Z_95 = 1.96


class Goal(NamedTuple):
    """What a task is measured by."""

    success: float  # the success rate that is to be reached
    rollouts: int  # at which the success rates are compared


class Reached(NamedTuple):
    """The rollouts to a goal; or, not reached in them, how many there were."""

    rollouts: int
    is_reached: bool


class Mean(NamedTuple):
    """A mean over seeds and half of its 95 % interval; None where there is one seed only."""

    value: float
    half: float | None


def isotonic(curve: Curve) -> list[float]:
    """The closest curve that never falls, by least squares with the games as weights (pool adjacent violators).

    Example: rates 0.2, 0.6, 0.4 of equally many games are 0.2, 0.5, 0.5.
    """
    pools: list[tuple[float, int, int]] = []  # mean, games, evaluations
    for _, success, games in curve:
        pool = (success, games, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, weight, length = pools.pop()
            total = weight + pool[1]
            pool = ((mean * weight + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return [mean for mean, _, length in pools for _ in range(length)]


def reach(curve: Curve, success: float) -> Reached:
    """The rollouts at the first evaluation from which the isotonic curve is at the success rate or above."""
    for (rollouts, _, _), smooth in zip(curve, isotonic(curve), strict=True):
        if smooth >= success:
            return Reached(rollouts, True)
    return Reached(curve[-1][0], False)


def success_at(curve: Curve, rollouts: int) -> float | None:
    """The success rate at a number of rollouts, on the line between two evaluations; None: the run was shorter."""
    for (left, low, _), (right, high, _) in zip(curve, curve[1:], strict=False):
        if left <= rollouts <= right:
            return low + (high - low) * (rollouts - left) / (right - left)
    return None


def falls(curve: Curve) -> bool:
    """Whether the last success rate is below the best by more than the 95 % interval of their difference.

    The interval takes the games as independent (normal approximation); the best is the maximum of several evaluations,
    so that this says "yes" a little too often.
    """
    _, best, games = max(curve, key=lambda point: point[1])
    _, last, last_games = curve[-1]
    return best - last > Z_95 * math.sqrt(best * (1 - best) / games + last * (1 - last) / last_games)


def mean(values: Sequence[float]) -> Mean:
    """Mean and half its 95 % interval by Student's t."""
    if len(values) == 1:
        return Mean(values[0], None)
    t = T_95.get(len(values) - 1, Z_95)
    return Mean(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each task, contestant and seed."""
    return list({(row["task"], row["contestant"], row["seed"]): row for row in rows}.values())


def best_search(rows: Sequence[Row], goal: Goal) -> Row:
    """The row that reaches the goal in the fewest rollouts; of equal ones the one whose curve has the higher mean."""
    return min(rows, key=lambda row: (_cost(reach(row["curve"], goal.success)), -_area(row["curve"])))


def _cost(reached: Reached) -> float:
    return reached.rollouts if reached.is_reached else math.inf


def _area(curve: Curve) -> float:
    return statistics.fmean(success for _, success, _ in curve)


def table(rows: Sequence[Row], goals: Mapping[str, Goal]) -> str:
    """A section in Markdown for each task that has rows, in the order of `goals`."""
    by_task: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in newest(rows):
        by_task[row["task"]][row["contestant"]].append(row)
    return "\n\n".join(_section(task, goal, by_task[task]) for task, goal in goals.items() if task in by_task) + "\n"


def _section(task: str, goal: Goal, contestants: Mapping[str, Sequence[Row]]) -> str:
    lines = [
        f"## {task}",
        "",
        f"| contestant | seeds | rollouts to {goal.success:g} | success at {goal.rollouts} | best | last | falls "
        "| start | entropy at the end | seconds | version |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ranked = sorted(contestants.items(), key=lambda item: (":" in item[0], _rank(item[1], goal)))
    return "\n".join([*lines, *(_line(name, found, goal) for name, found in ranked)])


def _rank(rows: Sequence[Row], goal: Goal) -> tuple[float, float]:
    """First whoever reaches the goal with most seeds, then in the fewest rollouts, then with the best curve."""
    reached = [reach(row["curve"], goal.success) for row in rows]
    share = sum(one.is_reached for one in reached) / len(rows)
    return -share, statistics.fmean(one.rollouts for one in reached) - statistics.fmean(
        _area(row["curve"]) for row in rows
    )


def _line(name: str, rows: Sequence[Row], goal: Goal) -> str:
    rows = sorted(rows, key=lambda row: row["seed"])
    curves: list[Curve] = [row["curve"] for row in rows]
    at = [value for curve in curves if (value := success_at(curve, goal.rollouts)) is not None]
    settings = " ".join(rows[0]["settings"])
    cells = [
        name if not settings or ":" in name or name == "old" else f"{name}: {settings}",
        " ".join(str(row["seed"]) for row in rows),
        _reached([reach(curve, goal.success) for curve in curves]),
        _share(at) if at else "",
        _share([max(success for _, success, _ in curve) for curve in curves]),
        _share([curve[-1][1] for curve in curves]),
        " ".join("yes" if falls(curve) else "no" for curve in curves),
        _share([curve[0][1] for curve in curves]),
        " ".join(f"{row['entropy']:.2f}" for row in rows),
        f"{statistics.fmean(row['cpu_s'] for row in rows):.0f}",
        " ".join(dict.fromkeys(row["version"] for row in rows)),
    ]
    return "| " + " | ".join(cells) + " |"


def _share(values: Sequence[float]) -> str:
    value, half = mean(values)
    return f"{value:.3f}" if half is None else f"{value:.3f} ± {half:.3f}"


def _reached(reached: Sequence[Reached]) -> str:
    """The mean, ">" before it where a seed did not get there in its rollouts, and each seed."""
    value, half = mean([one.rollouts for one in reached])
    above = "" if all(one.is_reached for one in reached) else ">"
    interval = "" if half is None or above else f" ± {half:.0f}"
    seeds = " ".join(f"{'' if one.is_reached else '>'}{one.rollouts}" for one in reached)
    return f"{above}{value:.0f}{interval}" + (f" ({seeds})" if len(reached) > 1 else "")
