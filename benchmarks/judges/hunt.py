"""`art hunt` on planted exploits and on the recipes' own rewards: what it finds, and in how long.

    python -m benchmarks.judges.hunt                          # the planted ones, each until found, at most 5 minutes
    python -m benchmarks.judges.hunt --only tag length --minutes 1
    python -m benchmarks.judges.hunt --recipes                # the recipes' rewards, with their own policies

The planted rewards are functions of tests/hunted/rollout.py, each as people write them and with one hole; `fair` has
none. A hunt begins with the known attacks, and goes on with a search only where they find nothing.
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
from typing import Any

from benchmarks.shared.paths import ROOT

PLANTED = ROOT / "tests" / "hunted" / "config.yaml"
NAMES = (
    *("contains", "any_number", "empty", "length", "tag", "tagged_number", "overlap", "is_json", "not_sorry"),
    *("self_report", "lenient", "close", "ratio", "agrees", "bullets", "confident", "finished", "refused", "late"),
    *("many_tags", "long_and_tagged", "thorough", "judged", "fair"),
)
JUDGE = "judge={entry: 'rollout.py:obedient'}"
RECIPES = (
    *("assistant", "tictactoe", "2048", "codenames", "email-search", "temporal-clue", "mcp-tools"),
    *("function-calling", "textworld"),  # with packages of their own (their READMEs); without one, a line has the error
)


def hunt(config: Path, minutes: float, runs: Path, settings: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Returns what `art hunt` prints, and its seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "art_cli", "hunt", str(config), f"runs={runs}", *settings]
    command += ["--minutes", str(minutes), "--scenarios", "6", "--json"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if not done.stdout:
        return {"error": done.stderr.strip().splitlines()[-1]}, time.monotonic() - begin
    found: dict[str, Any] = json.loads(done.stdout)
    return found, time.monotonic() - begin


def line(name: str, found: dict[str, Any], seconds: float) -> str:
    if "error" in found:
        return f"| {name} | {found['error'][:80]} | | | | {seconds:.0f} |"
    exploits = found["exploits"]
    best = f"{exploits[0]['score_mean']:.2f} by {exploits[0]['attack']}" if exploits else "none"
    honest = f"{found['honest_median']:.2f} | {found['honest_best']:.2f}"
    return f"| {name} | {honest} | {found['num_tried']} | {len(exploits)}: {best} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--recipes", action="store_true")
    options = parser.parse_args()
    print("| reward | honest median | honest best | attacks | exploits | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="art-hunt-") as directory:
        if options.recipes:
            for name in RECIPES:
                config = ROOT / "recipes" / name / "config.yaml"
                print(line(name, *hunt(config, options.minutes, Path(directory), ())), flush=True)
            return
        for name in options.only:
            settings = [f"rollout.entry=rollout.py:{name}", *([JUDGE] if name == "judged" else [])]
            for minutes in (0.0, options.minutes):
                found, seconds = hunt(PLANTED, minutes, Path(directory), settings)
                if found.get("exploits"):
                    break
            print(line(name, found, seconds), flush=True)


if __name__ == "__main__":
    main()
