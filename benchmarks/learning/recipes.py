"""The recipes, measured: trains one from nothing for several seeds and says how far each seed came.

    python -m benchmarks.learning.recipes tictactoe                  # seeds 0 1 2, about 15 minutes on 2 cores
    python -m benchmarks.learning.recipes tictactoe --seeds 0 --out x  # one seed, run directory kept under x
    python -m benchmarks.learning.recipes tictactoe --judge          # each seed also with RULER, by a judge with a rule
    python -m benchmarks.learning.recipes tictactoe --curve curve.svg  # draws the evaluations of all seeds
    python -m benchmarks.learning.recipes tictactoe train.steps=72   # with other settings

For each run: the mean of one metric over the fixed evaluation scenarios (the recipe's own rate, else the reward) at the
start, at the best checkpoint (that with the highest reward) and at the last one; the rise from the start to the last,
and how far the last is below the best, both over the same scenarios; the seconds of the whole `art train`, of its
parts, and of processors, which a busy machine does not change much. Intervals are of 95 %. With `--afresh` both
checkpoints are also loaded and evaluated again by `art eval`. The exit code is 1 if a seed did not rise beyond its
interval, or with `--judge` if the two ways to be rewarded end more than 0.05 apart. A recipe whose configuration plays
no groups has a config-groups.yaml for the judge.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from art_cli.loop.evaluate import Estimate, estimate, paired_difference, values_by_scenario
from art_cli.reports.pages.curve import Series, curve
from art_cli.runs.durable import read_lines
from art_cli.runs.run_checkpoints import wanted_steps
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from benchmarks.shared.commands import processor_seconds
from benchmarks.shared.paths import ROOT

ART = [sys.executable, "-m", "art_cli"]
METRICS = {
    "tictactoe": "win",
    "assistant": "right",
    "textworld": "won",
    "function-calling": "right",
}  # recipe -> the metric that tells how good it is, where that is not the reward
RULES = {
    "email-search": ("--group-rule", "email_search_rule.py:scores"),
    "tictactoe": ("--rule", "tictactoe_rule.py:rule"),
}  # recipe -> the rule of a judge server, in tests/support/judges
LIMIT = 0.05  # largest difference between the ends with and without the judge
HEAD = (
    "seed  reward   num   start                 best (step)                  last (step)                  "
    "rise                    last - best             "
    "seconds (sampling, training, judging; processors)  groups owed  gap"
)


def measure(config: Path, metric: str, seed: int, reward: str, runs: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Trains one seed in a process of its own and reads what it left. `reward` names the run."""
    given = [f"train.seed={seed}", f"name={reward}-{seed}", f"runs={runs}", *settings]
    begin, used = time.perf_counter(), processor_seconds()
    subprocess.run([*ART, "train", str(config), *given], check=True, stdout=subprocess.DEVNULL)
    seconds, used = time.perf_counter() - begin, processor_seconds() - used
    run = RunDir(runs / f"{reward}-{seed}")
    values = {step: _values(run, step, metric) for step in sorted(run.evaluations())}
    first, best, last = min(values), wanted_steps(run, "best")[0], max(values)
    train = [line.metrics for line in run.metrics() if line.split == "train"]
    return {
        "seed": seed,
        "reward": reward,
        "values": {step: estimate(list(found.values())) for step, found in values.items()},
        "played": [(float(at), line[name]) for at, line in enumerate(train) if (name := f"metrics.{metric}") in line],
        "best": best,
        "rise": paired_difference(values[last], values[first]),
        "below": paired_difference(values[last], values[best]),
        "seconds": seconds,
        "used": used,
        "parts": [sum(line[part] for line in train) for part in ("sample_s", "train_s", "judge_s")],
        "owed": sum(line.get("num_unscored", 0.0) for line in train),
        "gap": max(line.get("logprob_gap", 0.0) for line in train),
        "again": [str(config), *given, *(str(run.checkpoint_path(step)) for step in (best, last))],
    }


def _values(run: RunDir, step: int, metric: str) -> dict[str, float]:
    """Scenario -> mean of the metric over its attempts."""
    return values_by_scenario(list(read_lines(run.eval_path(step), Trajectory)))[metric]


def evaluate_afresh(row: dict[str, Any], metric: str) -> str:
    """The best and the last checkpoint, each loaded by `art eval`."""
    *given, best, last = row["again"]
    named = [word for path in dict.fromkeys((best, last)) for word in ("--checkpoint", path)]
    said = subprocess.run([*ART, "eval", *given, *named, "--json"], check=True, capture_output=True, text=True).stdout
    found = {result["policy"]: result["mean"] for result in json.loads(said)["metrics"] if result["metric"] == metric}
    return f"      afresh: best {found[best]:.3f}, last {found[last]:.3f}"


def judged_config(recipe: str) -> Path:
    """The recipe's configuration for a judge, which ranks the attempts of a group."""
    files = [ROOT / "recipes" / recipe / f"config{kind}.yaml" for kind in ("-ruler", "-groups", "")]
    return next(file for file in files if file.exists())


@contextlib.contextmanager
def judge_by_rule(recipe: str) -> Iterator[list[str]]:
    """The settings of a judge that reads the attempts in RULER's prompt and scores them by the recipe's rule."""
    if recipe not in RULES:  # its configuration names builtin:rule
        yield ["judge.cache=null"]
        return
    option, rule = RULES[recipe]
    command = [
        sys.executable,
        "-m",
        "tests.support.judges.judge_server",
        option,
        str(ROOT / "tests/support/judges" / rule),
    ]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        api_base = server.stdout.readline().strip()
        yield ["judge=ruler", f"judge.base_url={api_base}", "judge.model=rule", "judge.cache=null"]
    finally:
        server.kill()
        server.wait()


def line(row: dict[str, Any]) -> str:
    values: dict[int, Estimate] = row["values"]

    def at(step: int) -> str:
        return f"{_interval(values[step])} ({step:3d})"

    sampling, training, judging = row["parts"]
    seconds = f"{row['seconds']:.0f} ({sampling:.0f}, {training:.0f}, {judging:.0f}; {row['used']:.0f})"
    return (
        f"{row['seed']:4d}  {row['reward']:7s}  {values[0].num:4d}  {_interval(values[min(values)])}  "
        f"{at(row['best'])}  {at(max(values))}  {_interval(row['rise'], '+')}  {_interval(row['below'], '+')}  "
        f"{seconds:49s}  {row['owed']:11.0f}  {row['gap']:.1e}"
    )


def _interval(found: Estimate | None, sign: str = "") -> str:
    assert found is not None, "the same scenarios"
    return f"{found.mean:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def draw(recipe: str, metric: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line for each run: the metric in its evaluations, with intervals; of two alone, that of training besides."""
    has_judge = len({row["reward"] for row in rows}) > 1
    series = []
    for row in rows:
        points = [(float(step), found.mean) for step, found in row["values"].items()]
        band = [(float(step), found.low, found.high) for step, found in row["values"].items()]
        name = f"{row['reward']}, seed {row['seed']}" if has_judge else f"seed {row['seed']}"
        if len(points) == 2:
            series.append(Series(f"{name}, training", row["played"], has_dots=False))
            name += ", held out"
        series.append(Series(name, points, has_dots=True, band=band))
    return curve(f"{recipe}: {metric}", series)


def misses(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What one seed's runs did not show."""
    for row in rows:
        if row["rise"].low <= 0:
            yield f"seed {row['seed']}, {row['reward']}: no rise beyond the interval"
    ends = [row["values"][max(row["values"])].mean for row in rows]
    if max(ends) - min(ends) > LIMIT:
        yield f"seed {rows[0]['seed']}: with the judge {ends[-1] - ends[0]:+.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=sorted(path.parent.name for path in ROOT.glob("recipes/*/config.yaml")))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--judge", action="store_true", help="train each seed also with RULER")
    parser.add_argument("--metric", help="the metric to show, by the rollout's name")
    parser.add_argument("--afresh", action="store_true", help="evaluate the best and the last checkpoint again")
    parser.add_argument("--curve", type=Path, help="write the picture here")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    parser.add_argument("settings", nargs="*", help="for every run: key=value")
    options = parser.parse_intermixed_args()
    if options.judge and options.recipe not in RULES:
        parser.error(f"--judge: no rule for {options.recipe}; there are rules for {', '.join(RULES)}")
    metric = options.metric or METRICS.get(options.recipe, "reward")
    all_rows, missed = [], []
    print(f"{options.recipe}: {metric}\n{HEAD}", flush=True)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="art-recipes-"))
        runs = (options.out or Path(scratch)).resolve()
        ways = {"rollout": (ROOT / "recipes" / options.recipe / "config.yaml", ["judge=rollout"])}
        if options.judge:
            ways["ruler"] = judged_config(options.recipe), stack.enter_context(judge_by_rule(options.recipe))
        for seed in options.seeds:
            rows = []
            for reward, (config, way) in ways.items():
                rows.append(measure(config, metric, seed, reward, runs, [*way, *options.settings]))
                print(line(rows[-1]), flush=True)
                if options.afresh:
                    print(evaluate_afresh(rows[-1], metric), flush=True)
            missed += misses(rows)
            all_rows += rows
    if options.curve:
        options.curve.write_text(draw(options.recipe, metric, all_rows), encoding="utf-8")
    if missed:
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
