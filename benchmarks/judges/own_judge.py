"""`art reward` on attempts of the assistant recipe (SmolLM2-135M), whose own reward is the teacher.

    python -m benchmarks.judges.own_judge                    # 12 minutes on two idle cores
    python -m benchmarks.judges.own_judge --run runs/assistant --steps 2     # of a run that is there

A short run makes attempts: four steps of 24 requests with 8 attempts each. The judge learns from the first steps. It is
measured on held-out requests of these and on the last step's attempts, by a policy that has learned since. Then the
judge and the recipe's own reward score the last step as a cascade, and the calls of the second are counted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from art_cli.judges.cascade import FIRST
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import ScoredTrajectory

ROOT = Path(__file__).parents[2]
NUM_STEPS = 4


def art(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "art_cli", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def make_run(directory: Path) -> Path:
    settings = [f"runs={directory}", f"train.steps={NUM_STEPS}", "rollout.groups_per_step=24", "eval=null"]
    art("train", ROOT / "recipes/assistant/config.yaml", *settings)
    return directory / "assistant"


def cascade_calls(scored: Path, judge: Path) -> str:
    output = judge.with_name("cascade.jsonl")
    first = f"judge.first={{name: reward_model, model: '{judge}'}}"
    art("judge", scored, "-o", output, "judge.name=cascade", first, "judge.then={name: rollout}")
    groups = {each.group_id: each.scores for each in read_lines(output, ScoredTrajectory) if each.reward is not None}
    asked = sum(len(scores) > 1 and scores[0].judge == FIRST for scores in groups.values())
    return f"cascade: the second judge scored {asked} of {len(groups)} groups"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run of the recipe; otherwise one is made")
    parser.add_argument("--steps", type=int, default=2, help="the judge learns from this many first steps")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-own-judge-") as temporary:
        directory = Path(temporary)
        run = options.run or make_run(directory)
        files = sorted(run.glob("step_*/scored.jsonl"))
        start, judge = time.monotonic(), directory / "judge"
        learned = ["reward", *files[: options.steps], "-o", judge, f"reward.epochs={options.epochs}", "--json"]
        result = json.loads(art(*learned, "--base", "builtin:smollm2-135m", "--present", files[-1]))
        print(table(result, f"{(time.monotonic() - start) / 60:.1f}"))
        print(cascade_calls(files[-1], judge))


def table(result: dict[str, Any], minutes: str) -> str:
    lines = [f"{result['groups']} groups; {minutes} minutes", "| pairs | in the teacher's order |", "|---|---|"]
    for name, parts in result["measures"].items():
        for part, each in parts.items():
            lines.append(f"| {name}, {part} | {each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}] |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
