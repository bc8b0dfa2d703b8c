"""Attempts until a real model has learned a task: art's default, its default of before, and TRL's script.

    python -m benchmarks.learning.reach                                  # all that is missing; hours on two cores
    python -m benchmarks.learning.reach --only parcels --seeds 0
    python -m benchmarks.learning.reach --only parcels --sides default "rollout.groups_per_step=8"
    python -m benchmarks.learning.reach --table                          # runs nothing; prints the tables

A side is one of SIDES, settings of `art train` with spaces between them, or `trl` and settings of GRPOConfig.

    default     steps of 4 groups of 4 attempts, each compared with its group and the step (loss.baseline=shrunk)
    group       the same, compared with the group alone
    few         steps of 2 groups of 4 attempts; with `few, group` each is compared with its group alone
    large       steps of 8 groups of 8, compared with the group alone: the default before
    before      the same with advantages divided by the deviation and no bound on a step: the default before it
    warm        the default after imitating the best of the base's first 64 attempts
    risk        exponential rewards (ideas.py), in groups of two (pairs), or with a wide clip
    ppo         16 scenarios played once each, with a critic
    gigpo       credit by step
    oapl        OAPL (ideas.py)
    trl         TRL's GRPOTrainer with steps of 8 groups of 8, each trained on four times
    trl small   the same with the default's steps; `trl few` has those of `few`

All sides share base, adapter and the order of scenarios. A side of small steps plays half of the attempts. TRL's
trainer plays the same rollout function (trl_side.py); the assistant's agent calls tools, so its TRL side is
benchmarks/speed/loop_trl.py at the fastest of its settings.

Some sides cannot be run again. `k3`: before 2026-11-29, when the bound on a step counted the KL by k3. `own ties`: the
day after, when a group of equal rewards was compared mostly with itself. `low ties`: a trial in which only such groups
below the others were compared with the others.

Every run is a row of benchmarks/results/reach.jsonl: the attempts and the mean reward of each step, and the share of
right answers among held-out scenarios by attempts. Rows that are there are not run again. A run has reached the target
with the first window of at least 64 attempts whose mean reward is above it.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.compose import load_config
from art_cli.loop.decide import decide_by_base
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows
from benchmarks.speed.loop import make_base
from benchmarks.speed.loop_shapes import SHAPES

ROWS = ROOT / "benchmarks" / "results" / "reach.jsonl"
SHAPE = SHAPES["demo"]
DEADLINE_S = 6 * 3600.0  # longest time for one run
EVERY = 64  # attempts between two evaluations
TRL_BATCH = 8  # attempts in one forward pass of TRL's training; 16 of 400 tokens fill 12 GB
SMALL = 16  # attempts of a step by default
WINDOW = 64  # attempts over which a reward is averaged
LARGE = ("rollout.group_size=8", "rollout.groups_per_step=8")
PAIRS = ("rollout.group_size=2", "rollout.groups_per_step=8")
ALONE = ("rollout.group_size=1", "rollout.groups_per_step=16")
IDEAS = f"algorithm.entry={ROOT / 'benchmarks' / 'learning' / 'ideas.py'}"
RISK = f"{IDEAS}:RiskSeeking"
SIDES = {
    "default": (),
    "group": ("loss.baseline=group",),
    "large": LARGE,
    "few": ("attempts=few", "loss.baseline=shrunk"),
    "few, group": ("attempts=few",),
    "before": (*LARGE, "loss.scale_advantages=true", "train.max_kl=null"),
    "risk, pairs": (RISK, *PAIRS),
    "risk, clip 4": (RISK, "algorithm.options={clip: 4}"),
    "ppo": ("loss=ppo", "loss.gamma=1", "loss.gae_lambda=0.8", *ALONE),
    "gigpo": ("loss=gigpo", "loss.scale_advantages=false"),
    "oapl": (f"{IDEAS}:Oapl", "train.epochs_per_step=8"),
    "trl": (*LARGE, "num_iterations=4"),
    "trl small": ("num_iterations=4",),
    "trl few": ("rollout.groups_per_step=2", "num_iterations=4"),
}


class Task(NamedTuple):
    """A task with a real model, and the mean reward that counts as learned."""

    config: Path
    attempts: int  # of a whole run
    target: float
    right: str = "right"  # the metric of a right answer


def _made(name: str, attempts: int, target: float, right: str = "right") -> Task:
    return Task(ROOT / "benchmarks" / "learning" / "tasks" / f"{name}.yaml", attempts, target, right)


TASKS = {
    "assistant": Task(SHAPE.config, 768, 0.9),
    "parcels": _made("parcels", 640, 0.6),
    "mail": _made("mail", 512, 0.9),
    "rooms": _made("rooms", 1024, 0.5),
    "orders": _made("orders", 512, 0.8),
    "textworld": _made("textworld", 640, 0.6, "won"),
    "function_calling": _made("function_calling", 512, 0.5),
}


def train_art(task: Task, side: str, runs: Path, name: str, seed: int) -> dict[str, Any]:
    """Returns the row of one run of `art train`, which is continued if it is there."""
    settings = list(SIDES.get(side, side.split()))
    rollout = load_config(task.config, settings).config.rollout
    of_step = rollout.group_size * rollout.groups_per_step
    steps, every = _num_steps(task, of_step)
    return read_art(_train(task, [*settings, f"train.steps={steps}", f"eval.every={every}"], runs, name, seed), task)


def train_warm(task: Task, runs: Path, name: str, seed: int) -> dict[str, Any]:
    """Returns the row of a run of the default that has first imitated the best of 64 attempts of the base."""
    still = [f"train.steps={EVERY // SMALL}", "train.learning_rate=1e-30", "eval=null"]  # no weight moves
    first = _train(task, still, runs, f"{name}-first", seed)
    files = sorted(first.root.glob("step_*/scored.jsonl"))
    best = max(each.reward or 0.0 for file in files for each in read_lines(file, ScoredTrajectory))
    sft = [f"sft.demos={first.root}", "sft.best_of=4", f"sft.min_reward={best}", "sft.epochs=4"]
    sft.append("sft.learning_rate=4e-4")
    steps, every = _num_steps(task, SMALL)
    told = [*sft, f"train.steps={steps - EVERY // SMALL}", f"eval.every={every}"]
    begun, then = (read_art(run, task) for run in (first, _train(task, told, runs, name, seed)))
    right = {EVERY + attempts: share for attempts, share in then["right"].items()}
    return {key: begun[key] + then[key] for key in ("attempts", "rewards")} | {"right": right}


def begin(task: Task, runs: Path, name: str, seed: int) -> RunDir:
    """Returns a run of one step, which has the base, adapter and first evaluation from which TRL's side starts."""
    return _train(task, ["train.steps=1", "eval.every=1"], runs, name, seed)


def _train(task: Task, settings: Sequence[str], runs: Path, name: str, seed: int) -> RunDir:
    told = [f"train.seed={seed}", f"name={name}", f"runs={runs}"]
    _python("-m", "art_cli", "train", str(task.config), *settings, *told)
    return RunDir(runs / name)


def read_art(run: RunDir, task: Task) -> dict[str, Any]:
    lines = [line.metrics for line in run.metrics() if line.split == "train"]
    played = [round(metrics["num_trajectories"]) for metrics in lines]
    right = {sum(played[:step]): values[task.right] for step, values in sorted(run.evaluations().items())}
    return {"attempts": played, "rewards": [metrics["reward_mean"] for metrics in lines], "right": right}


def train_demo_in_trl(base: Path, side: str, seed: int, task: Task) -> dict[str, Any]:
    """Returns the row of one run of the demo as a TRL script: its agent calls tools, which `trl_side` does not play."""
    scene = [setting for setting in SIDES[side] if setting.startswith("rollout.")]
    loaded = load_config(SHAPE.config, [f"model.base={base}", *scene])
    settings = [f"train.seed={seed}", f"train.learning_rate={decide_by_base(loaded, str(base)).config.train.rate}"]
    of_step = loaded.config.rollout.group_size * loaded.config.rollout.groups_per_step
    told = [SHAPE.name, str(base), *SHAPE.trl, "--steps", str(_num_steps(task, of_step)[0]), *scene, *settings]
    if of_step >= WINDOW:
        told += ["--until", str(task.target)]
    steps = [
        json.loads(line) for line in _python("-m", "benchmarks.speed.loop_trl", *told).splitlines() if line[:1] == "{"
    ]
    return {"attempts": [step["games"] for step in steps], "rewards": [step["reward"] for step in steps]}


def train_trl(task: Task, start: RunDir, side: str, out: Path, seed: int) -> dict[str, Any]:
    """Returns the row of one run of TRL's trainer, with the base and adapter from which the run `start` started.

    Words of the side with `rollout.` change the scene; the others are settings of GRPOConfig.
    """
    rate = json.loads(start.config_path.read_text())["train"]["learning_rate"]
    settings = [f"learning_rate={rate}", *SIDES.get(side, side.split()[1:])]
    scene = [setting for setting in settings if setting.startswith("rollout.")]
    rollout = load_config(task.config, scene).config.rollout
    of_step = rollout.group_size * rollout.groups_per_step
    steps, every = _num_steps(task, of_step)
    told = [str(task.config), *scene, "--base", str(start.base), "--start", str(start.checkpoint_path(0))]
    told += ["--out", str(out), "--steps", str(steps), "--every", str(every), "--seed", str(seed)]
    told += ["--batch", str(min(TRL_BATCH, of_step))]
    told += [word for setting in settings if setting not in scene for word in ("--set", setting)]
    shutil.rmtree(out, ignore_errors=True)
    rewards = json.loads(_python("-m", "benchmarks.learning.trl_side", *told).splitlines()[-1])["rewards"]
    right = {0: start.evaluations()[0][task.right]}
    for step in range(every, steps + 1, every):
        told = [
            "--checkpoint",
            str(RunDir(out).checkpoint_path(step)),
            f"model.base={start.base}",
            f"runs={out.parent}",
        ]
        found = json.loads(_python("-m", "art_cli", "eval", str(task.config), *told, "--json"))
        right[step * of_step] = next(row["mean"] for row in found["metrics"] if row["metric"] == task.right)
    return {"attempts": [of_step] * len(rewards), "rewards": rewards, "right": right}


def _num_steps(task: Task, of_step: int) -> tuple[int, int]:
    """Returns the steps of a run, and between two evaluations. A run of small steps plays half of the attempts."""
    attempts = task.attempts if of_step >= WINDOW else task.attempts // 2
    return attempts // of_step, max(1, EVERY // of_step)


def _python(*arguments: str) -> str:
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")
    return done.stdout


def reached(row: dict[str, Any], target: float) -> int | None:
    """Returns the attempts after which the window's mean reward is above the target; None: never."""
    steps = list(zip(row["attempts"], row["rewards"], strict=True))
    for end in range(1, len(steps) + 1):
        num, total = 0, 0.0
        for attempts, reward in reversed(steps[:end]):
            num, total = num + attempts, total + attempts * reward
            if num >= WINDOW:
                break
        if num >= WINDOW and total / num >= target - 1e-9:  # rewards are tenths, and their sums rounded
            return sum(row["attempts"][:end])
    return None


def _first_right(row: dict[str, Any], target: float) -> int | str:
    """Returns the attempts before the first evaluation with this share of right answers."""
    right = {int(attempts): share for attempts, share in row.get("right", {}).items()}
    return min((attempts for attempts, share in right.items() if share >= target), default="never" if right else "-")


def table(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Returns a Markdown table of a task's sides."""
    target, sides = TASKS[name].target, defaultdict(list)
    for row in rows:
        if row["task"] == name:
            sides[row["side"]].append(row)
    head = f"| {name} | seeds | attempts to {target:g} of the reward | to {target:g} right, held out |"
    lines = [f"{head} right by attempts, held out |", "|---|---|---|---|---|"]
    for side, of_side in sides.items():
        of_side.sort(key=lambda row: int(row["seed"]))
        taken = [reached(row, target) or f"above {sum(row['attempts'])}" for row in of_side]
        right = defaultdict(list)
        for row in of_side:
            for attempts, share in row.get("right", {}).items():
                right[int(attempts)].append(share)
        curve = ", ".join(f"{attempts}: {statistics.fmean(of):.2f}" for attempts, of in sorted(right.items()))
        held_out = [_first_right(row, target) for row in of_side]
        told = " | ".join(", ".join(map(str, each)) for each in (taken, held_out))
        lines.append(f"| {side} | {len(of_side)} | {told} | {curve or '-'} |")
    return "\n".join(lines)


def _name(task: str, side: str, seed: int) -> str:
    """Returns the name of a run's directory."""
    return re.sub(r"[^a-z0-9_.-]+", "-", f"{task}-{side}-{seed}".lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", default=["default", "before", "trl"])
    parser.add_argument("--runs", type=Path, default=ROOT / ".scratch" / "reach", help="base and runs are kept here")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = read_rows(ROWS)
    known = {(row["task"], row["side"], row["seed"]) for row in rows}
    given.runs.mkdir(parents=True, exist_ok=True)
    plan = [(task, side, seed) for task in given.only for seed in given.seeds for side in given.sides]
    for task, side, seed in plan if not given.table else []:
        if (task, side, seed) in known:
            continue
        run = RunDir(given.runs / _name(task, side, seed))
        if side.startswith("trl") and task == "assistant":
            found = train_demo_in_trl(make_base(SHAPE, given.runs), side, seed, TASKS[task])
        elif side == "warm":
            found = train_warm(TASKS[task], given.runs, run.root.name, seed)
        elif side.startswith("trl"):
            start = begin(TASKS[task], given.runs, _name(task, "start", seed), seed)
            found = train_trl(TASKS[task], start, side, run.root, seed)
        else:
            found = train_art(TASKS[task], side, given.runs, run.root.name, seed)
        rows.append({"task": task, "side": side, "seed": seed, **found})
        append_row(ROWS, rows[-1])
    print("\n\n".join(table(rows, task) for task in given.only))


if __name__ == "__main__":
    main()
