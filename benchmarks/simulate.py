"""The simulation of the loop against the loop: seconds per step, measured and simulated, in layouts it has not seen.

    python -m benchmarks.simulate                        # all cases; hours on two quiet cores
    python -m benchmarks.simulate --only tiny --steps 4  # the smallest

Each case is a run of `art train`. Its first half of steps calibrates the simulation, which then predicts the mean of
the other half, and of runs of the same task in other layouts. The runs of a case follow each other, so that they meet
the same load; beside other programs the ratios vary widely. Wanted: within 15 %. The last four columns are measured and
simulated seconds of each part.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.loop.calibration import Calibration, calibrate
from art_cli.loop.simulation import StepTimes, simulate
from art_cli.runs.run_dir import RunDir

ROOT = Path(__file__).parent.parent
DEADLINE_S = 3600.0  # longest time for one run
SLOW_JUDGE = "a judge of a second"
OFF_POLICY = ("train.max_staleness=1", "loss.off_policy={name: truncate}")
CONCURRENCIES = {f"concurrency {number}": (f"rollout.concurrency={number}",) for number in (8, 128)}


class Case(NamedTuple):
    """A task in one layout, and the settings of others."""

    config: str
    settings: tuple[str, ...]
    steps: int
    others: dict[str, tuple[str, ...]] = {}


CASES = {
    "tiny": Case(
        "tests/letters/config.yaml",
        ("rollout.groups_per_step=16", "rollout.group_size=8", "rollout.concurrency=32", "rollout.processes=2"),
        8,
        {**CONCURRENCIES, "one step ahead": OFF_POLICY},
    ),
    "game": Case(
        "recipes/tictactoe/config-groups.yaml",
        ("rollout.concurrency=32", "rollout.groups_per_step=16"),
        8,
        {**CONCURRENCIES, "one step ahead": OFF_POLICY},
    ),
    "agent": Case(
        "benchmarks/loop_agent/config.yaml",
        ("rollout.entry=slow.py:rollout", "rollout.concurrency=32", "rollout.max_turns=3"),
        4,
        {
            "concurrency 8": ("rollout.concurrency=8",),
            SLOW_JUDGE: ("judge={name: function, entry: 'slow.py:judge'}",),
            "one step ahead": OFF_POLICY,
            **{f"{number} nodes": (f"nodes={number}",) for number in (1, 2, 3)},
        },
    ),
    "mail": Case("benchmarks/learning_tasks/mail.yaml", (), 2, {"concurrency 8": ("rollout.concurrency=8",)}),
}


@contextlib.contextmanager
def cluster(settings: Sequence[str]) -> Iterator[list[str]]:
    """Yields the settings with "nodes=2" as the address of a Ray cluster of as many nodes with rollouts."""
    nodes = next((int(each.removeprefix("nodes=")) for each in settings if each.startswith("nodes=")), 0)
    if not nodes:
        yield list(settings)
        return
    from tests.support.ray_cluster import LocalCluster

    with LocalCluster(0, *[1] * nodes) as ray:  # this machine plays nothing
        yield [f"rollout.cluster={{address: '{ray.address}'}}", f"rollout.processes={nodes}"]


def train(runs: Path, name: str, case: Case, settings: Sequence[str], steps: int) -> RunDir:
    with cluster(settings) as known:
        always = (f"runs={runs}", f"name={name}", f"train.steps={steps}", "eval=null", "train.keep_checkpoints=1")
        command = [sys.executable, "-m", "art_cli", "train", str(ROOT / case.config), *case.settings, *known, *always]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return RunDir(runs / name)


def line(title: str, known: Calibration, measured: Calibration, taken: Sequence[StepTimes]) -> str:
    """Returns the row of a layout: `known` calibrates, `taken` are the steps that it is to predict."""
    workload = known.workload
    if title.endswith(SLOW_JUDGE):  # whose time the first run cannot have measured
        workload = workload._replace(groups=tuple(each._replace(judge_s=1.0) for each in workload.groups))
    guess = simulate(workload, known.rates, measured.layout, steps=len(taken))
    seconds, guessed = (sum(each.total_s for each in times) / len(times) for times in (taken, guess))
    parts = [
        f"{sum(each[index] for each in taken) / len(taken):.2f} / {sum(each[index] for each in guess) / len(guess):.2f}"
        for index in range(4)
    ]
    return f"| {title} | {seconds:.2f} | {guessed:.2f} | {guessed / seconds:.2f} | {' | '.join(parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layouts", nargs="+", help="the titles of the other layouts to run; all without it")
    parser.add_argument("--steps", type=int, help="of each run, instead of its own number")
    options = parser.parse_args()
    print("| layout | measured s/step | simulated | ratio | sampling | judging | training | rest |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        case = CASES[name]
        steps = options.steps or case.steps
        with tempfile.TemporaryDirectory(prefix="art-simulate-") as directory:
            run = train(Path(directory), "first", case, (), steps)
            known = calibrate(run, range(steps // 2))
            measured = calibrate(run, range(steps // 2, steps))
            print(line(f"{name}: the other steps", known, measured, measured.times), flush=True)
            for number, (title, settings) in enumerate(case.others.items()):
                if options.layouts is None or title in options.layouts:
                    other = calibrate(train(Path(directory), f"other{number}", case, settings, steps))
                    print(line(f"{name}: {title}", known, other, other.times), flush=True)


if __name__ == "__main__":
    main()
