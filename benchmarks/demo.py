"""The main job, measured: trains recipes/tictactoe from nothing for several seeds and says how far each came.

    python -m benchmarks.demo                     # seeds 0 1 2, about 15 minutes on 2 cores
    python -m benchmarks.demo --seeds 0 --out x   # one seed, run directory kept under x
    python -m benchmarks.demo --judge             # each seed also with RULER, by a judge that scores by the rules
    python -m benchmarks.demo train.steps=72      # with other settings

For each run: the share of won games among the fixed evaluation games at the start, at the best checkpoint (that with
the highest reward) and at the last one; the rise from the start to the last with its 95 % interval, and how far the
last is below the best; the wins of both checkpoints, loaded afresh by `art eval`; the seconds of the whole `art train`
and its parts. With `--judge` the exit code is 1 if the two ways to be rewarded end more than 0.05 apart.
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

from art_cli.checkpoints import wanted_steps
from art_cli.loop.evaluate import Estimate, paired_difference, values_by_scenario
from art_cli.run_dir import RunDir, read_lines
from art_cli.trajectory import Trajectory

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "recipes" / "tictactoe" / "config.yaml"
ART = [sys.executable, "-m", "art_cli"]
LIMIT = 0.05  # largest difference between the wins with and without the judge
HEAD = (
    "seed  reward   games  wins at start  best (step)  last (step)  rise [95 %]             last - best [95 %]       "
    "afresh: best, last  seconds (sampling, training, judging)  groups owed  gap"
)


def measure(seed: int, reward: str, runs: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Trains one seed in a process of its own and reads what it left. `reward` names the run."""
    common = [f"train.seed={seed}", f"name={reward}-{seed}", f"runs={runs}", *settings]
    begin = time.perf_counter()
    subprocess.run([*ART, "train", str(CONFIG), *common], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    run = RunDir(runs / f"{reward}-{seed}")
    evaluated = sorted(run.evaluations())
    best, last = wanted_steps(run, "best")[0], evaluated[-1]
    wins = {step: _wins(run, step) for step in (evaluated[0], best, last)}
    train = [line.metrics for line in run.metrics() if line.split == "train"]
    return {
        "seed": seed,
        "reward": reward,
        "games": len(wins[last]),
        "wins": {step: sum(values.values()) / len(values) for step, values in wins.items()},
        "best": best,
        "last": last,
        "rise": paired_difference(wins[last], wins[evaluated[0]]),
        "below": paired_difference(wins[last], wins[best]),
        "afresh": _play(run, common, best, last),
        "seconds": seconds,
        "parts": [sum(line[part] for line in train) for part in ("sample_s", "train_s", "judge_s")],
        "owed": sum(line.get("num_unscored", 0.0) for line in train),
        "gap": max(line.get("logprob_gap", 0.0) for line in train),
    }


def _wins(run: RunDir, step: int) -> dict[str, float]:
    """Scenario -> share of wins."""
    return values_by_scenario(list(read_lines(run.eval_path(step), Trajectory)))["win"]


def _play(run: RunDir, settings: Sequence[str], *steps: int) -> list[float]:
    """The wins of the checkpoints of these steps, each loaded by `art eval`."""
    paths = [str(run.checkpoint_path(step)) for step in steps]
    named = [word for path in dict.fromkeys(paths) for word in ("--checkpoint", path)]
    command = [*ART, "eval", str(CONFIG), *settings, *named, "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {row["policy"]: row["mean"] for row in json.loads(said) if row["metric"] == "win"}
    return [found[path] for path in paths]


@contextlib.contextmanager
def judge_by_rule() -> Iterator[list[str]]:
    """The settings of a judge that reads the games in RULER's prompt and scores them by the rules of tic-tac-toe."""
    rule = ROOT / "tests" / "support" / "tictactoe_rule.py"
    command = [sys.executable, "-m", "tests.support.judge_server", "--rule", f"{rule}:rule"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        api_base = server.stdout.readline().strip()
        yield ["judge=ruler", f"judge.api_base={api_base}", "judge.model=rule", "judge.cache=null"]
    finally:
        server.kill()
        server.wait()


def line(row: dict[str, Any]) -> str:
    def at(step: int) -> str:
        return f"{row['wins'][step]:.3f} ({step:3d})"

    sampling, training, judging = row["parts"]
    seconds = f"{row['seconds']:.1f} ({sampling:.1f}, {training:.1f}, {judging:.1f})"
    return (
        f"{row['seed']:4d}  {row['reward']:7s}  {row['games']:5d}  {row['wins'][min(row['wins'])]:13.3f}  "
        f"{at(row['best']):11s}  {at(row['last']):11s}  {_interval(row['rise'])}  {_interval(row['below'])}  "
        f"{row['afresh'][0]:12.3f}, {row['afresh'][1]:.3f}  {seconds:37s}  {row['owed']:11.0f}  {row['gap']:.1e}"
    )


def _interval(difference: Estimate | None) -> str:
    assert difference is not None, "the same games"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--judge", action="store_true", help="train each seed also with RULER")
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    parser.add_argument("settings", nargs="*", help="for every run: key=value")
    options = parser.parse_args()
    missed = []
    print(HEAD, flush=True)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="art-demo-"))
        runs = (options.out or Path(scratch)).resolve()
        ways = {"rollout": ["judge=rollout"]}
        if options.judge:
            ways["ruler"] = stack.enter_context(judge_by_rule())
        for seed in options.seeds:
            rows = [measure(seed, reward, runs, [*way, *options.settings]) for reward, way in ways.items()]
            print("\n".join(map(line, rows)), flush=True)
            ends = [row["wins"][row["last"]] for row in rows]
            if max(ends) - min(ends) > LIMIT:
                missed.append(f"seed {seed}: {ends[-1] - ends[0]:+.3f}")
    if missed:
        raise SystemExit(f"with the judge and without it more than {LIMIT} apart: {', '.join(missed)}")


if __name__ == "__main__":
    main()
