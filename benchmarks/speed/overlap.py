"""What sampling beside training gains and costs: the demo with train.max_staleness 0 and 1, in turn.

    python -m benchmarks.speed.overlap                    # about six minutes on 2 quiet cores
    python -m benchmarks.speed.overlap --pairs 1 --steps 8

With 0 the engine sleeps while the learner works, so that every token is trained on by the policy that sampled it. With
1 the policy before plays the next batch meanwhile, and its tokens get truncated importance weights. Each pair has one
seed for both; which comes first changes from pair to pair. All runs share one warm-up, which is not counted. A step's
time is the mean over the steps after the first; processor seconds are those of the whole process without the warm-up.
`reward` is the share of won games in 400 fixed games after the last step.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT

CONFIG = ROOT / "recipes" / "tictactoe" / "config-groups.yaml"
OFF_POLICY = ("train.max_staleness=1", "loss.off_policy={name: truncate}")
DEADLINE_S = 900.0


class Measured(NamedTuple):
    """One training."""

    step_s: float
    cpu_s: float  # processor seconds per step of all its processes, start and evaluation included
    reward: float


def measure(runs: Path, name: str, *settings: str) -> Measured:
    words = [f"runs={runs}", f"name={name}", *settings]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "art_cli", "train", str(CONFIG), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = RunDir(runs / name).metrics()
    times = [line.time for line in lines if line.split == "train"]
    reward = [line.metrics["reward"] for line in lines if line.split == "eval"]
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Measured((times[-1] - times[0]) / (len(times) - 1), cpu_s / len(times), reward[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    sides: dict[str, tuple[str, ...]] = {"0": (), "1": OFF_POLICY}
    found: dict[str, list[Measured]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="art-overlap-") as scratch:
        measure(Path(scratch), "warm-up", "train.steps=2", "eval.every=2")
        for pair in range(options.pairs):
            seed = options.first_seed + pair
            for name in list(sides) if pair % 2 else list(sides)[::-1]:
                words = (f"train.seed={seed}", f"train.steps={options.steps}", f"eval.every={options.steps}")
                found[name].append(measure(Path(scratch), f"seed{seed}-{name}", *words, *sides[name]))
                print(f"seed {seed}, max_staleness {name}: {found[name][-1]}", file=sys.stderr)
    print("| max_staleness | s per step | processor s per step | reward after the last step |\n|---|---|---|---|")
    for name, runs in found.items():
        rewards = ", ".join(f"{run.reward:.3f}" for run in runs)
        step, cpu = (statistics.median(values) for values in zip(*[run[:2] for run in runs], strict=True))
        print(f"| {name} | {step:.2f} | {cpu:.2f} | {rewards} |")
    ratios = [one.step_s / zero.step_s for zero, one in zip(found["0"], found["1"], strict=True)]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"\nA step with 1 takes {statistics.median(ratios):.2f} times as long ({shown}), over {options.steps} steps.")


if __name__ == "__main__":
    main()
