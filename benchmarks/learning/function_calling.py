"""The function-calling recipe, measured: the base and trained models on held-out functions, by category.

    python -m benchmarks.learning.function_calling                       # seeds 0 1 2
    python -m benchmarks.learning.function_calling --seeds 0 --trl       # and TRL's GRPOTrainer at as many attempts
    python -m benchmarks.learning.function_calling train.steps=30        # with other settings

Needs the packages of the recipe's README. Every seed is trained by `art train` without evaluations. With --trl,
benchmarks/learning/trl_side.py then trains from the same first adapter on the same questions in the same order, with
the same rollout function, rewards, attempts, epochs, learning rate and temperature; its rate falls to 0, not to
decay_to. `art eval` plays all held-out questions with the base and with each trained model, in one command.

The table has a line for each model: the share of right replies by category, with 95 % intervals; the paired difference
from the base in all categories; minutes of training on the clock, and of processors, which a busy machine changes less.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.compose import load_config
from art_cli.models.base_source import find_base
from art_cli.runs.run_dir import RunDir
from benchmarks.shared.commands import processor_seconds
from benchmarks.shared.paths import ROOT

CONFIG = ROOT / "recipes" / "function-calling" / "config.yaml"
METRICS = ("right", "right_simple_python", "right_live_simple", "right_multiple", "right_irrelevance")
TRL_BATCH = 8  # attempts in one forward pass of TRL; 32 of 400 tokens keep about 25 GB of activations (an estimate)

Values = dict[str, dict[str, Any]]  # metric -> what `art eval --json` says of it


class Trained(NamedTuple):
    """A trained model. Example: Trained("art, seed 0", RunDir(Path("runs/art-0")), 5.1, 9.8)."""

    name: str
    run: RunDir
    minutes: float
    processor_minutes: float


def train(seed: int, runs: Path, settings: Sequence[str]) -> Trained:
    run = runs / f"art-{seed}"
    given = [f"train.seed={seed}", f"name={run.name}", f"runs={runs}", "eval=null", *settings]
    return _timed(f"art, seed {seed}", run, ["-m", "art_cli", "train", str(CONFIG), *given])


def train_trl(seed: int, runs: Path, settings: Sequence[str]) -> Trained:
    """Trains from the first checkpoint of the seed's other run. TRL counts every epoch of a batch as steps."""
    run = runs / f"trl-{seed}"
    loaded = load_config(CONFIG, list(settings)).config
    steps, epochs = loaded.train.steps, loaded.train.epochs_per_step
    updates = str(steps * epochs)
    start = RunDir(runs / f"art-{seed}").checkpoint_path(0)
    given = ["--base", loaded.model.base, "--start", str(start), "--out", str(run)]
    given += ["--steps", updates, "--every", updates, "--seed", str(seed), "--batch", str(TRL_BATCH)]
    for setting in (
        f"learning_rate={loaded.train.learning_rate}",
        f"num_iterations={epochs}",
        f"lr_scheduler_type={'constant' if loaded.train.decay == 'none' else loaded.train.decay}",
    ):
        given += ["--set", setting]
    return _timed(f"TRL, seed {seed}", run, ["-m", "benchmarks.learning.trl_side", str(CONFIG), *settings, *given])


def find_settings(given: Sequence[str], runs: Path) -> list[str]:
    """Returns the settings for all commands: those given, and the base as a directory, which is written here."""
    loaded = load_config(CONFIG, list(given))
    base = find_base(loaded.config.model.base, directory=loaded.directory, built=runs / "base")
    return [*given, f"model.base={base}"]


def _timed(name: str, run: Path, arguments: Sequence[str]) -> Trained:
    begin, used = time.perf_counter(), processor_seconds()
    _python(arguments)
    return Trained(name, RunDir(run), (time.perf_counter() - begin) / 60, (processor_seconds() - used) / 60)


def _python(arguments: Sequence[str]) -> str:
    """Returns what a Python process printed. Its progress goes to this one's stderr."""
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def evaluate(models: Sequence[Trained], runs: Path, settings: Sequence[str]) -> list[Values]:
    """Returns the values of the base, then those of each model, over the same questions."""
    newest = [str(model.run.checkpoint_path(max(model.run.checkpoint_steps()))) for model in models]
    named = [word for path in ("base", *newest) for word in ("--checkpoint", path)]
    given = [str(CONFIG), *settings, f"runs={runs}", *named, "--json"]
    found: dict[str, Values] = {}
    for row in json.loads(_python(["-m", "art_cli", "eval", *given]))["metrics"]:
        found.setdefault(row["policy"], {})[row["metric"]] = row
    return list(found.values())


def table(models: Sequence[Trained], values: Sequence[Values]) -> str:
    """Returns a Markdown table: the base, then each model."""
    nums = [f"{metric.removeprefix('right_')} ({values[0][metric]['num']})" for metric in METRICS]
    lines = [["model", *nums, "rise", "minutes", "processor minutes"]]
    lines.append(["---"] * len(lines[0]))
    lines.append(["base", *(_interval(values[0][metric]) for metric in METRICS), "", "", ""])
    for model, of_model in zip(models, values[1:], strict=True):
        shares = [_interval(of_model[metric]) for metric in METRICS]
        rise = _interval(of_model["right"]["difference"], "+")
        lines.append([model.name, *shares, rise, f"{model.minutes:.1f}", f"{model.processor_minutes:.1f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval(found: dict[str, Any], sign: str = "") -> str:
    return f"{found['mean']:{sign}.2f} [{found['low']:{sign}.2f}, {found['high']:{sign}.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trl", action="store_true", help="train each seed also with TRL")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    parser.add_argument("settings", nargs="*", help="for every run: key=value")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="art-function-calling-") as scratch:
        runs = (given.out or Path(scratch)).resolve()
        settings = find_settings(given.settings, runs)
        models = []
        for seed in given.seeds:
            models.append(train(seed, runs, settings))
            if given.trl:
                models.append(train_trl(seed, runs, settings))
        print(table(models, evaluate(models, runs, settings)))


if __name__ == "__main__":
    main()
