"""Credit per turn where one early move decides: rollouts to a success of 0.9, by algorithm, and how good the critic is.

    python -m benchmarks.learning.credit                              # every missing row of three seeds
    python -m benchmarks.learning.credit --losses ppo --seeds 0 --steps 20
    python -m benchmarks.learning.credit --table                      # runs nothing

The task is benchmarks/learning/doors. Success is the mean training reward of three steps in a row. Each run is one line
of benchmarks/results/credit.jsonl, and a run that is there is not run again.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

ROWS = ROOT / "benchmarks" / "results" / "credit.jsonl"
CONFIG = ROOT / "benchmarks" / "learning" / "doors" / "config.yaml"
LOSSES = ("grpo", "gigpo", "ppo")
ROLLOUTS = 8 * 8  # of one step
GOAL, WINDOW = 0.9, 3
DEADLINE_S = 3600.0  # longest time for one run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=LOSSES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, recorded with the row")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for seed in [] if args.table else args.seeds:
        for loss in args.losses:
            key = {"loss": loss, "seed": seed, "steps": args.steps, "set": args.set}
            if not any(row.items() >= key.items() for row in read_rows(ROWS)):
                row = {**key, **run(loss, seed, args.steps, args.set)}
                append_row(ROWS, row)
    print_table()


def run(loss: str, seed: int, steps: int, settings: list[str]) -> dict[str, Any]:
    """What one training run showed. `to_goal`: rollouts until the success was reached; None: not in these steps."""
    with tempfile.TemporaryDirectory(prefix="credit-") as scratch:
        overrides = [f"loss={loss}", f"train.seed={seed}", f"train.steps={steps}", f"runs={scratch}", *settings]
        command = [sys.executable, "-m", "art_cli", "train", str(CONFIG), *overrides]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=DEADLINE_S)
        lines = [line for line in RunDir(Path(scratch) / "doors").metrics() if line.split == "train"]
    rewards = [line.metrics["reward_mean"] for line in lines]
    means = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    reached = next((index + WINDOW for index, mean in enumerate(means) if mean >= GOAL), None)
    explained = [line.metrics["explained_variance"] for line in lines if "explained_variance" in line.metrics]
    return {
        "to_goal": None if reached is None else reached * ROLLOUTS,
        "last": means[-1] if means else rewards[-1],
        "explained_first": explained[0] if explained else None,
        "explained_last": explained[-1] if explained else None,
        "step_s": (lines[-1].time - lines[0].time) / max(1, len(lines) - 1),
        "rewards": rewards,
    }


def print_table() -> None:
    print("| loss | seed | steps | settings | rollouts to 0.9 | success at the end | explained variance | s per step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in sorted(read_rows(ROWS), key=lambda row: (row["loss"], row["set"], row["seed"])):
        first, last = row["explained_first"], row["explained_last"]
        explained = "" if first is None else f"{first:.2f} to {last:.2f}"
        settings = " ".join(row["set"])
        print(
            f"| {row['loss']} | {row['seed']} | {row['steps']} | {settings} | {row['to_goal'] or 'not reached'} "
            f"| {row['last']:.2f} | {explained} | {row['step_s']:.1f} |"
        )


if __name__ == "__main__":
    main()
