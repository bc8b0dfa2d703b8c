"""Two tasks in one run beside each task alone: what each is worth after equally many rollouts of it.

    python -m benchmarks.learning.mixture                              # every missing row of three seeds
    python -m benchmarks.learning.mixture --seeds 0 --steps 10
    python -m benchmarks.learning.mixture --table                      # runs nothing

The tasks are those of benchmarks/learning/two_tasks: tic-tac-toe and plain letters, played as two sources
(`rollout.sources`). `both` has steps as large as a task alone, half of each task, and twice as many of them; `wide` has
as many steps, which are twice as large. So each task has the same number of rollouts in every run. All runs of a seed
start from one warmed-up policy. The evaluations are of the same scenarios, so that the differences are paired. Each run
is one line of benchmarks/results/mixture.jsonl, and a run that is there is not run again.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from art_cli.config.compose import load_config
from art_cli.loop.evaluate import Estimate, estimate
from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

ROWS = ROOT / "benchmarks" / "results" / "mixture.jsonl"
CONFIG = ROOT / "benchmarks" / "learning" / "two_tasks" / "config.yaml"
TASKS = ("tictactoe", "letters")
TOGETHER = {"both": (1, 2), "wide": (2, 1)}  # groups of a step, and steps, as multiples of those of a task alone
DEADLINE_S = 3600.0  # longest time for one command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", default=["both", *TASKS], help="both, wide, tictactoe, letters")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    for seed in [] if args.table else args.seeds:
        missing = [arm for arm in args.arms if not any(is_row(row, arm, seed, args.steps) for row in read_rows(ROWS))]
        with tempfile.TemporaryDirectory(prefix="mixture-") as scratch:
            for arm in missing:
                row = {"arm": arm, "seed": seed, "steps": args.steps, **run(arm, seed, args.steps, Path(scratch))}
                append_row(ROWS, row)
    print_table()


def is_row(row: dict[str, Any], arm: str, seed: int, steps: int) -> bool:
    return (row["arm"], row["seed"], row["steps"]) == (arm, seed, steps)


def run(arm: str, seed: int, steps: int, scratch: Path) -> dict[str, Any]:
    """Returns each played task's rollouts and its rewards by scenario, before and after."""
    common, start = [f"train.seed={seed}", f"runs={scratch}"], scratch / "start"
    if not start.exists():
        art("sft", CONFIG, f"{CONFIG.parent / 'letters.py'}:demos", "-o", start, *common)
    files = RunDir(scratch / arm)
    art("checkpoints", files.root, "--import", start)
    larger, longer = TOGETHER.get(arm, (1, 1))
    sizes = [f"rollout.groups_per_step={larger * load_config(CONFIG).config.rollout.groups_per_step}"]
    steps *= longer
    alone = [f"~rollout.sources.{other}" for other in TASKS if arm in TASKS and other != arm]
    begin = time.perf_counter()
    art("train", CONFIG, *common, f"name={arm}", f"train.steps={steps}", *sizes, *alone)
    seconds, tasks = time.perf_counter() - begin, {}
    for task in TASKS if arm in TOGETHER else (arm,):
        played = sum(each.source == task for step in range(steps) for each in files.trajectories(step))
        first, last = (files.evaluation(step).values[f"reward.{task}"] for step in (0, steps))
        tasks[task] = {"rollouts": played, "first": sum(first.values()) / len(first), "last": last}
    return {"tasks": tasks, "seconds": round(seconds, 1)}


def art(*arguments: object) -> None:
    command = [sys.executable, "-m", "art_cli", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=DEADLINE_S)


def print_table() -> None:
    """Prints each task and seed, then each task over its seeds; a difference is that of both together and alone."""
    known = {(row["arm"], row["seed"], row["steps"]): row for row in read_rows(ROWS)}
    print("| task | seed | steps alone | rollouts | before | alone | together | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for task in TASKS:
        for together in TOGETHER:
            pooled: dict[str, tuple[float, float]] = {}
            for (arm, seed, steps), alone in sorted(known.items(), key=lambda item: item[0][1:]):
                if arm != task or (together, seed, steps) not in known:
                    continue
                one, other = (row["tasks"][task] for row in (alone, known[together, seed, steps]))
                pairs = {f"{seed}/{steps}/{id}": (value, other["last"][id]) for id, value in one["last"].items()}
                facts = f"{seed} | {steps} | {one['rollouts']}, {other['rollouts']} | {one['first']:.3f}"
                print(f"| {task}, {together} | {facts} | {compared(pairs)} |")
                pooled |= pairs
            if pooled:
                print(f"| {task}, {together} | all | | | | {compared(pooled)} |")


def compared(pairs: dict[str, tuple[float, float]]) -> str:
    """Returns the cells of rewards alone and together, and their paired difference."""
    sides = [estimate([pair[side] for pair in pairs.values()]) for side in (0, 1)]
    difference = estimate([together - alone for alone, together in pairs.values()])
    return " | ".join([*map(shown, sides), shown(difference, "+.3f")])


def shown(value: Estimate, form: str = ".3f") -> str:
    """Example: "0.812 [0.790, 0.833]"."""
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


if __name__ == "__main__":
    main()
