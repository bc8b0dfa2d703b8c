"""Attempts until the demo's agent is right nine times of ten: ours beside TRL's script, each from the same base.

    python -m benchmarks.learning.reach                          # both sides, three seeds: hours on two cores
    python -m benchmarks.learning.reach --seeds 0 --sides art
    python -m benchmarks.learning.reach --table                  # runs nothing; prints the table

Ours is `art train` on the recipe's config.yaml as it is. TRL's is benchmarks/speed/loop_trl.py at the fastest of its
settings, with the same scenarios in the same order, the same adapter, epochs, sampling and learning rate; its rate
falls linearly to 0 over its steps. A side has reached the reward with the first step whose attempts have that mean.
TRL may take twice as many steps as the recipe, and ends where it has reached the reward. Every run is a row of
benchmarks/results/reach.jsonl, with the mean reward of each step; rows that are there are not run again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_cli.config.compose import load_config
from art_cli.loop.decide import decide_by_base
from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows
from benchmarks.speed.loop import make_base
from benchmarks.speed.loop_shapes import SHAPES

ROWS = ROOT / "benchmarks" / "results" / "reach.jsonl"
SHAPE = SHAPES["demo"]
REWARD = 0.9
DEADLINE_S = 6 * 3600.0  # longest time for one run


def train_art(base: Path, runs: Path, seed: int) -> list[float]:
    """Returns the mean reward of each step's attempts."""
    name = f"art-{seed}"
    given = [f"model.base={base}", f"train.seed={seed}", "eval=null", f"name={name}", f"runs={runs}"]
    _python("-m", "art_cli", "train", str(SHAPE.config), *given)
    return read_art(runs, seed)


def read_art(runs: Path, seed: int) -> list[float]:
    return [line.metrics["reward_mean"] for line in RunDir(runs / f"art-{seed}").metrics() if line.split == "train"]


def train_trl(base: Path, runs: Path, seed: int, steps: int) -> list[float]:
    loaded = load_config(SHAPE.config, [f"model.base={base}"])
    rate = decide_by_base(loaded, str(base)).config.train.rate
    settings = [f"train.seed={seed}", f"train.learning_rate={rate}"]
    told = [SHAPE.name, str(base), *SHAPE.trl, "--steps", str(steps), "--until", str(REWARD), *settings]
    _python("-m", "benchmarks.speed.loop_trl", *told, output=runs / f"trl-{seed}.jsonl")
    return read_trl(runs, seed)


def read_trl(runs: Path, seed: int) -> list[float]:
    lines = (runs / f"trl-{seed}.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines if line.startswith("{")]


def _python(*arguments: str, output: Path = Path(os.devnull)) -> None:
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    with output.open("w") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table of the attempts that each run took."""
    attempts = {(row["side"], row["seed"]): row for row in rows}
    lines = ["| side | seed | attempts to 0.9 | reward of each step |", "|---|---|---|---|"]
    for (side, seed), row in sorted(attempts.items()):
        step = next((i for i, reward in enumerate(row["rewards"], 1) if reward >= REWARD), None)
        taken = f"more than {len(row['rewards']) * row['attempts']}" if step is None else str(step * row["attempts"])
        lines.append(f"| {side} | {seed} | {taken} | {' '.join(f'{reward:.2f}' for reward in row['rewards'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=["art", "trl"], default=["art", "trl"])
    parser.add_argument("--runs", type=Path, default=ROOT / ".scratch" / "reach", help="base and runs are kept here")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--broken-off", action="store_true", help="the steps of runs that were broken off become rows")
    given = parser.parse_args()
    rows = read_rows(ROWS)
    known = {(row["side"], row["seed"]) for row in rows}
    given.runs.mkdir(parents=True, exist_ok=True)
    config = load_config(SHAPE.config, []).config
    for seed in given.seeds if not given.table else []:
        for side in given.sides:
            if (side, seed) in known:
                continue
            if given.broken_off:
                found = read_art(given.runs, seed) if side == "art" else read_trl(given.runs, seed)
            elif side == "art":
                found = train_art(make_base(SHAPE, given.runs), given.runs, seed)
            else:
                found = train_trl(make_base(SHAPE, given.runs), given.runs, seed, 2 * config.train.steps)
            attempts = config.rollout.group_size * config.rollout.groups_per_step
            rows.append({"side": side, "seed": seed, "attempts": attempts, "rewards": found})
            append_row(ROWS, rows[-1])
    print(table(rows))


if __name__ == "__main__":
    main()
