"""The demo trained with RULER in place of its own reward: does a judge that follows the rules lead to the same agent?

    python -m benchmarks.judge_demo                 # seed 0, twice the time of the demo
    python -m benchmarks.judge_demo --seeds 0 1 2

Each seed is trained twice from the same start: with the reward that the rollout returns, and with `judge=ruler` against
a judge server that reads the games in the prompt and scores them by the rules of tic-tac-toe
(tests/support/tictactoe_rule.py).
The win rates are those of the last evaluation, over the recipe's 400 fixed games.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from art_cli.run_dir import RunDir

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "recipes" / "tictactoe" / "config.yaml"
LIMIT = 0.05


class Trained(NamedTuple):
    """One run. `owed` counts groups that the judge could not score."""

    start: float
    end: float
    seconds: float
    judge_s: float  # the part of judging that rollouts did not hide, over all steps
    owed: float


def train(name: str, runs: Path, *settings: str) -> Trained:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "art_cli", "train", str(CONFIG), f"runs={runs}", f"name={name}", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = RunDir(runs / name).metrics()
    wins = {line.step: line.metrics["win"] for line in lines if line.split == "eval"}
    steps = [line.metrics for line in lines if line.split == "train"]
    return Trained(
        wins[min(wins)],
        wins[max(wins)],
        time.perf_counter() - begin,
        sum(step["judge_s"] for step in steps),
        sum(step.get("num_unscored", 0.0) for step in steps),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("settings", nargs="*", help="for both runs: train.steps=2 and the like")
    options = parser.parse_args()
    rule = ROOT / "tests" / "tictactoe_rule.py"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.judge_server", "--rule", f"{rule}:rule"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        api_base = server.stdout.readline().strip()
        missed = []
        print("seed  judge    wins at start  wins at end  seconds  judging not hidden  groups owed")
        with tempfile.TemporaryDirectory(prefix="art-judge-demo-") as scratch:
            ruler = ["judge=ruler", f"judge.api_base={api_base}", "judge.model=rule", "judge.cache=null"]
            for seed in options.seeds:
                ends = []
                for name, settings in (("rollout", ["judge=rollout"]), ("ruler", ruler)):
                    run = train(f"{name}-{seed}", Path(scratch), f"train.seed={seed}", *settings, *options.settings)
                    print(
                        f"{seed:4d}  {name:7s}  {run.start:13.3f}  {run.end:11.3f}  {run.seconds:7.1f}  "
                        f"{run.judge_s:18.2f}  {run.owed:11.0f}",
                        flush=True,
                    )
                    ends.append(run.end)
                if abs(ends[0] - ends[1]) > LIMIT:
                    missed.append(f"seed {seed}: {ends[1] - ends[0]:+.3f}")
    finally:
        server.kill()
        server.wait()
    if missed:
        raise SystemExit(f"more than {LIMIT} apart: {', '.join(missed)}")


if __name__ == "__main__":
    main()
