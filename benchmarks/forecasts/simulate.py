"""The simulation behind `art plan --on` against the loop: seconds per step, measured and simulated, in layouts that the
calibration has not seen.

    python -m benchmarks.forecasts.simulate                          # all cases twice; hours on two quiet cores
    python -m benchmarks.forecasts.simulate --only tiny --steps 4 --times 1  # the smallest
    python -m benchmarks.forecasts.simulate --times 1 --runs DIR     # keeps the runs; again, it calibrates anew by them

Each case is a run of `art train`. Its first half of steps calibrates the simulation, which then predicts the mean of
the other half, and of runs of the same task in other layouts. Before each other layout the case's own is run again and
calibrates anew, because a machine's speed drifts with what else runs on it; with --runs it is run once. Wanted: within
15 %. The last columns are
measured and simulated seconds of each part, and the calibration's correction.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from art_cli.loop.calibration import Calibration, calibrate, finished_steps
from art_cli.loop.simulation import StepTimes, simulate
from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT

DEADLINE_S = 3600.0  # longest time for one run
SLOW_JUDGE = "a judge of a second"
CONCURRENCIES = {f"concurrency {number}": (f"rollout.concurrency={number}",) for number in (8, 128)}


class Case(NamedTuple):
    """A task in one layout, and the settings of others."""

    config: str
    settings: tuple[str, ...]
    steps: int
    others: dict[str, tuple[str, ...]]


CASES = {
    "tiny": Case(
        "tests/letters/config.yaml",
        ("rollout.groups_per_step=16", "rollout.group_size=8", "rollout.concurrency=32", "rollout.processes=2"),
        8,
        CONCURRENCIES,
    ),
    "game": Case(
        "recipes/tictactoe/config-groups.yaml",
        ("rollout.concurrency=32", "rollout.groups_per_step=16"),
        8,
        CONCURRENCIES,
    ),
    "agent": Case(
        "benchmarks/speed/loop_agent/config.yaml",
        ("rollout.entry=slow.py:rollout", "rollout.concurrency=32", "rollout.max_turns=3"),
        4,
        {
            "concurrency 8": ("rollout.concurrency=8",),
            SLOW_JUDGE: ("judge={name: function, entry: 'slow.py:judge'}",),
            **{f"{number} nodes": (f"nodes={number}",) for number in (1, 2, 3)},
        },
    ),
    "mail": Case(  # the real model
        "benchmarks/learning/tasks/mail.yaml",
        ("rollout.concurrency=32",),
        4,
        {"concurrency 8": ("rollout.concurrency=8",)},
    ),
}


@contextlib.contextmanager
def cluster(settings: Sequence[str]) -> Iterator[list[str]]:
    """Yields the settings with "nodes=2" as the address of a Ray cluster of as many nodes with rollouts."""
    nodes = next((int(each.removeprefix("nodes=")) for each in settings if each.startswith("nodes=")), 0)
    if not nodes:
        yield list(settings)
        return
    from tests.support.others.ray_cluster import LocalCluster

    with LocalCluster(0, *[1] * nodes) as ray:  # this machine plays nothing
        yield [f"rollout.cluster={{address: '{ray.address}'}}", f"rollout.processes={nodes}"]


def train(runs: Path, name: str, case: Case, settings: Sequence[str], steps: int) -> RunDir:
    if (runs / name / "curve.svg").exists():  # written at the end
        return RunDir(runs / name)
    with cluster(settings) as known:
        always = (f"runs={runs}", f"name={name}", f"train.steps={steps}", "eval=null", "train.keep_checkpoints=1")
        command = [sys.executable, "-m", "art_cli", "train", str(ROOT / case.config), *case.settings, *known, *always]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return RunDir(runs / name)


def calibrated(run: RunDir, steps: range) -> Calibration:
    measured = finished_steps(run, last=1000)
    return calibrate(run, {step: measured[step] for step in steps})


def row(title: str, known: Calibration, measured: Calibration) -> str:
    """Returns the row of a layout: `known` calibrates, and the steps of `measured` are to be predicted."""
    steps = known.steps
    if title.endswith(SLOW_JUDGE):  # whose time the first run cannot have measured
        steps = [s._replace(groups=tuple(each._replace(judge_s=1.0) for each in s.groups)) for s in steps]
    parts = [
        StepTimes(*map(fmean, zip(*times, strict=True)))
        for times in (measured.times, [simulate(step, known.rates, measured.layout) for step in steps])
    ]
    taken, guess = (sum(times) for times in parts)
    pairs = " | ".join(f"{one:.2f} / {other:.2f}" for one, other in zip(*parts, strict=True))
    return f"| {title} | {taken:.2f} | {guess:.2f} | {guess / taken:.2f} | {pairs} | {known.correction:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layouts", nargs="+", help="the titles of the other layouts to run; all without it")
    parser.add_argument("--steps", type=int, help="of each run, instead of its own number")
    parser.add_argument("--times", type=int, default=2, help="how often each layout is run")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and take those that are there")
    options = parser.parse_args()
    print("| layout | measured s/step | simulated | ratio | sampling | judging | training | rest | correction |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.only * options.times:
        case = CASES[name]
        steps = options.steps or case.steps
        for title, settings in case.others.items():
            if options.layouts is not None and title not in options.layouts:
                continue
            with tempfile.TemporaryDirectory(prefix="art-simulate-") as scratch:
                directory = (options.runs / name if options.runs else Path(scratch)).resolve()
                first = train(directory, "first", case, (), steps)
                known, rest = calibrated(first, range(steps // 2)), calibrated(first, range(steps // 2, steps))
                print(row(f"{name}: the other steps", known, rest), flush=True)
                other = train(directory, title.replace(" ", "-"), case, settings, steps)
                known, there = calibrated(first, range(1, steps)), calibrated(other, range(1, steps))
                print(row(f"{name}: {title}", known, there), flush=True)


if __name__ == "__main__":
    main()
