"""How the training step grows with what is new and with what is shared: attempts, prompt length, turns.

    python -m benchmarks.step.scaling [--repeats 2] [--plots DIRECTORY]

Figure 8, a model of 1M parameters with LoRA, float32, in processor seconds: 2 to 64 attempts at one prompt of 200
tokens; prompts of 100 to 4,000 tokens with 32 attempts of 64 each; 1 to 16 turns of 8 attempts, with sub-agents. The
exponent is that of time in tokens computed: 1 is linear. Attention over a long shared prompt is not free: every new
token still looks at all of it.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.learners.torch_learner import TorchLearner
from art_cli.reports.pages.judge_page import axis, scatter
from benchmarks.shared.models import build
from benchmarks.shared.sides import Row, table
from benchmarks.step.batches import Groups, make_learner, multi_turn, single_turn

SIZE = "1M"


class Point(NamedTuple):
    x: int  # value of the varied quantity
    computed: int  # tokens
    flat: int  # tokens of rows that share nothing
    cpu_s: float  # processor time of the fastest step


class Line(NamedTuple):
    name: str
    points: list[Point]

    def slope(self, tokens: str) -> float:
        """Of log time against log of that count of tokens, from the first point to the last; 1: linear."""
        first, last = self.points[0], self.points[-1]
        return math.log(last.cpu_s / first.cpu_s) / math.log(getattr(last, tokens) / getattr(first, tokens))


def cases() -> dict[str, dict[int, Groups]]:
    return {
        "attempts at one prompt": {n: single_turn(1, n, prompt=200, completion=64) for n in (2, 4, 8, 16, 32, 64)},
        "tokens of the prompt": {n: single_turn(1, 32, prompt=n, completion=64) for n in (100, 400, 1000, 2000, 4000)},
        "turns": {n: multi_turn(8, turns=n, sampled=32, reply=16) for n in (1, 2, 4, 8, 16)},
    }


def lines(*, repeats: int = 2) -> list[Line]:
    learner = make_learner(build(SIZE, has_adapter=True))
    found = []
    for name, by_x in cases().items():
        learner.step(next(iter(by_x.values())))  # warm
        found.append(Line(name, [_point(learner, x, groups, repeats) for x, groups in by_x.items()]))
    return found


def _point(learner: TorchLearner, x: int, groups: Groups, repeats: int) -> Point:
    best = math.inf
    for _ in range(repeats):
        begin = time.process_time()
        metrics = learner.step(groups)
        best = min(best, time.process_time() - begin)
    return Point(x, metrics.tokens_computed, metrics.tokens_flat, best)


def plot(line: Line) -> str:
    """An SVG picture: seconds over what was varied, and the straight line from the first point to the last."""
    points = [(float(point.x), point.cpu_s) for point in line.points]
    xs, ys = zip(*points, strict=True)
    return scatter(
        f"Training step over {line.name}",
        points,
        axis(xs, line.name, low=0.0),
        axis(ys, "processor seconds", low=0.0),
        line=(points[0], points[-1]),
    )


def rows_of(found: Sequence[Line]) -> list[Row]:
    rows = []
    for line in found:
        steps = ", ".join(f"{point.x}: {point.cpu_s:.2f}" for point in line.points)
        tokens = ", ".join(f"{point.computed}" for point in line.points)
        flat, slope = line.slope("flat"), line.slope("computed")
        rows.append(
            Row("8", f"step over {line.name}", f"{steps} s cpu", "", round(slope, 2), "<= 1 (linear)",
                f"tokens computed {tokens}; exponent of time by them; by tokens of flat rows {flat:.2f}")
        )  # fmt: skip
    return rows


def measure(*, repeats: int = 2, plots: Path | None = None) -> list[Row]:
    """The rows; with `plots`, also learner_<line>.svg there."""
    found = lines(repeats=repeats)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for line in found:
            (plots / f"learner_{line.name.split()[0]}.svg").write_text(plot(line))
    return rows_of(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    print(table(measure(repeats=arguments.repeats, plots=arguments.plots)))


if __name__ == "__main__":
    main()
