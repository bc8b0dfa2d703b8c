"""What `train.learning_rate: auto` is worth: the reward at the end of a run, beside seven rates set by hand.

    python -m benchmarks.learning.rates                                # all that is missing; hours
    python -m benchmarks.learning.rates --only mail --rates auto 1e-4 1e-3 --seeds 0
    python -m benchmarks.learning.rates --only mail --rates auto auto,train.epochs_per_step=1 auto,loss.clip=0.3
    python -m benchmarks.learning.rates --table                        # runs nothing; prints the table

Every run is a row of benchmarks/results/rates.jsonl: task, rate, seed, the rate that auto came to, and the mean reward
of the evaluation before the first step and after the last. Rows that are there are not run again. A rate may have other
settings behind it, which compares defaults of these at the rate that auto comes to. The runs of one task and seed share
their start: base, warm-up, first evaluation and the attempts of the first step. The table has how far the mean over the
seeds lies below that of the best rate, with the 95 % interval of the difference, paired by seed; a rate stands still if
its rise is less than a tenth of the best one's.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.runs.run_dir import RunDir
from benchmarks.learning.table import T_95
from benchmarks.shared import commands
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

ROWS = ROOT / "benchmarks" / "results" / "rates.jsonl"
RATES = ("auto", "1e-5", "5e-5", "1e-4", "2e-4", "5e-4", "1e-3", "2e-3")
DEADLINE_S = 3 * 3600.0  # longest time for one run
USAGE = 2  # exit code of a mistake in the command or the configuration
STILL = 0.1  # share of the best rise below which a rate stands still


class Task(NamedTuple):
    """A task: its configuration, and the settings that it is measured with."""

    config: str
    steps: int
    settings: tuple[str, ...] = ()


TASKS = {
    "mail": Task("benchmarks/learning/tasks/mail.yaml", 6, ("attempts=many",)),  # a real model, an adapter
    "mail-whole": Task("benchmarks/learning/tasks/mail.yaml", 6, ("attempts=many", "model.lora=null")),
    "tictactoe": Task("recipes/tictactoe/config-groups.yaml", 40),  # a random model, whole weights
    "tictactoe-lora": Task("recipes/tictactoe/config-groups.yaml", 40, ("model.lora={rank: 16, alpha: 32}",)),
    "sorting": Task("benchmarks/learning/tasks/sorting.yaml", 40),
    "sorting-lora": Task("benchmarks/learning/tasks/sorting.yaml", 40, ("model.lora={rank: 16, alpha: 32}",)),
    "filtering": Task("benchmarks/learning/tasks/filtering.yaml", 40),
    "guessing": Task("benchmarks/learning/tasks/guessing.yaml", 40),
    "codenames": Task("recipes/codenames/config.yaml", 20),
    "letters": Task("tests/letters/config.yaml", 40, ("rollout.groups_per_step=8", "rollout.group_size=8")),
}


def run(name: str, rate: str, seed: int, runs: Path) -> dict[str, Any]:
    """Returns the row of one run of `art train`, which goes on from the start that all rates share."""
    task, began = TASKS[name], time.perf_counter()
    value, *others = rate.split(",")
    files = RunDir(runs / f"{name}_{rate.replace('=', '-').replace(',', '_')}_{seed}")
    begin(name, seed, files.root, is_same=not others)
    ended = train(files.root, task, seed, f"train.learning_rate={value}", f"train.steps={task.steps}", *others)
    means = {step: values["reward"] for step, values in sorted(files.evaluations().items())}
    config = json.loads(files.config_path.read_text())
    return {
        "task": name,
        "rate": rate,
        "seed": seed,
        "came_to": config["train"]["learning_rate"],
        "before": means[min(means)],
        "after": means[max(means)] if ended else 0.0,  # a run that ended with an error learned nothing
        "seconds": round(time.perf_counter() - began, 1),
    }


def begin(name: str, seed: int, run: Path, *, is_same: bool) -> None:
    """Makes the directory of a run that has been warmed up, evaluated and played its first step, and not trained.

    Without `is_same` it has the warmed-up checkpoint alone, because a run does not go on with other settings.
    """
    start = run.parent / f"{name}_start_{seed}"
    if not (start / "checkpoints" / "step_0001").is_dir():
        train(start, TASKS[name], seed, "train.learning_rate=auto", "train.steps=1")
    if run.exists():
        return  # it was broken off, and goes on
    if not is_same:
        art("checkpoints", str(run), "--import", str(start / "checkpoints" / "step_0000"))
        return
    shutil.copytree(start, run, ignore=shutil.ignore_patterns("step_0001", "logs", "claim"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] == 0))


def train(run: Path, task: Task, seed: int, *settings: str) -> bool:
    """Runs `art train` to its end. False: it ended with an error."""
    always = (f"name={run.name}", f"runs={run.parent}", f"train.seed={seed}", f"eval.every={task.steps}",
              "train.keep_checkpoints=1")  # fmt: skip
    return art("train", str(ROOT / task.config), *task.settings, *always, *settings)


def art(*arguments: str) -> bool:
    """Runs the command. Returns False if it ended with an error; a mistake or a full disk ends this program."""
    done = commands.art(*arguments, timeout_s=DEADLINE_S)
    if done.returncode:
        print(commands.last_lines(done), file=sys.stderr)
    if done.returncode == USAGE or "no space left on the disk" in done.stderr:
        raise SystemExit(USAGE)
    return done.returncode == 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of all rows: a line for each task and rate."""
    ends: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    starts: dict[str, dict[int, float]] = defaultdict(dict)
    came: dict[tuple[str, str], float] = {}
    for row in rows:
        ends[row["task"]][row["rate"]][row["seed"]] = row["after"]
        starts[row["task"]][row["seed"]] = row["before"]
        came[row["task"], row["rate"]] = row["came_to"]
    lines = ["| task | rate | seeds | before | after | verdict |", "|---|---|---|---|---|---|"]
    for name, by_rate in ends.items():
        best = max(by_rate, key=lambda rate: statistics.fmean(by_rate[rate].values()))
        for rate in sorted(by_rate, key=lambda rate: (not rate.startswith("auto"), came[name, rate])):
            after, seeds = by_rate[rate], sorted(by_rate[rate])
            before = statistics.fmean(starts[name][seed] for seed in seeds)
            shown = f"{rate} ({came[name, rate]:g})" if rate.startswith("auto") else rate
            shown_ends = " ".join(f"{after[seed]:.3f}" for seed in seeds)
            verdict = judge(after, by_rate[best], before)
            lines.append(
                f"| {name} | {shown} | {' '.join(map(str, seeds))} | {before:.3f} | {shown_ends} | {verdict} |"
            )
    return "\n".join(lines)


def judge(after: dict[int, float], best: dict[int, float], before: float) -> str:
    """Returns what the ends of a rate are, beside those of the best one."""
    if after is best:
        return "best"
    if statistics.fmean(after.values()) - before < STILL * (statistics.fmean(best.values()) - before):
        return "stands still"
    differences = [best[seed] - after[seed] for seed in sorted(after.keys() & best.keys())]
    if len(differences) < 2:
        return f"{differences[0]:+.3f} below the best" if differences else ""
    half = T_95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    return f"{mean:.3f} +- {half:.3f} below the best" + (": within its interval" if mean <= half else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / ".scratch" / "rates", help="the runs are kept here")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = read_rows(ROWS)
    known = {(row["task"], row["rate"], row["seed"]) for row in rows}
    wanted = [(name, rate, seed) for name in options.only for seed in options.seeds for rate in options.rates]
    for job in wanted if not options.table else []:
        if job not in known:
            rows.append(run(*job, options.runs.resolve()))
            print(json.dumps(rows[-1]), file=sys.stderr)
            append_row(ROWS, rows[-1])
    print(table(rows))


if __name__ == "__main__":
    main()
