"""`learner: {name: prompt}` for an agent whose model is an endpoint that cannot be trained: what a prompt brings.

    python -m benchmarks.learning.prompt_search             # three seeds
    python -m benchmarks.learning.prompt_search --seeds 0 --steps 4
    python -m benchmarks.learning.prompt_search --kills 3   # each run is killed three times, and ends as the others

The endpoint is no language model: it follows rules that it finds in its system message, and so does the model that
reflects (tests/support/judges/rule_followers.py), which fails or writes a bad prompt in half of its answers. So the
figures are of the search, not of any model: one that finds every rule of the house ends at about 0.9, because one reply
in ten is garbled. Held out are tickets of the same kinds with other words. Dollars are at the prices of the
configuration.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from art_cli.runs.run_dir import RunDir
from art_cli.runs.system_prompt import read_prompt
from benchmarks.shared.paths import ROOT
from tests.support.judges.rule_followers import HOUSE, RULE, of_followers, rule_followers
from tests.support.servers.chat_server import ChatServer, chatting

CONFIG = ROOT / "tests" / "prompted" / "config.yaml"
DEADLINE_S = 900.0  # longest time for one run
KILL_S = (2.0, 9.0)  # a kill comes so long after a start, at random: a start takes about 3 s


def search(server: ChatServer, runs: Path, *, seed: int, steps: int, kills: int) -> dict[str, Any]:
    """Runs one search, and returns what it found."""
    settings = [*of_followers(server), f"runs={runs}", f"train.seed={seed}", f"train.steps={steps}", "eval.attempts=4"]
    command, draw = [sys.executable, "-m", "art_cli", "train", str(CONFIG), *settings], random.Random(seed)
    for _ in range(kills):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(*KILL_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=DEADLINE_S)
    files = RunDir(runs / "prompted")
    lines = [line.metrics for line in files.metrics() if line.split == "train"]
    evaluations, prompt = files.evaluations(), read_prompt(files.checkpoint_path(steps))
    assert prompt is not None
    rules = dict(RULE.findall(prompt.text))
    return {
        "seed": seed,
        "before": evaluations[0]["reward"],
        "after": evaluations[steps]["reward"],
        "rules": sum(rules.get(kind) == style for kind, style in HOUSE.items()),
        "tested": sum("is_accepted" in line for line in lines),
        "kept": sum(line.get("is_accepted", 0.0) for line in lines),
        "attempts": sum(line["num_trajectories"] for line in lines),
        "usd": sum(line.get("reflection_usd", 0.0) for line in lines),
        "answers": sum(body["model"] == "reflector" for body in server.asked),
        "prompt": prompt.text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory(prefix="prompt-search-") as scratch, chatting(rule_followers()) as server:
            rows.append(search(server, Path(scratch), seed=seed, steps=args.steps, kills=args.kills))
    if args.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    print(f"| seed | held-out reward before | after {args.steps} steps | rules found | proposals kept | attempts | "
          "answers of the reflector | reflection |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['seed']} | {row['before']:.2f} | {row['after']:.2f} | {row['rules']} of {len(HOUSE)} | "
            f"{row['kept']:.0f} of {row['tested']} | {row['attempts']:.0f} | {row['answers']} | ${row['usd']:.3f} |"
        )


if __name__ == "__main__":
    main()
