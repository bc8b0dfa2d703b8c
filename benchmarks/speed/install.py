"""What `make demo` installs on a bare clone: seconds and megabytes, beside an older revision or the tests' set-up.

    python -m benchmarks.speed.install                # make setup-demo and make setup of the last commit
    python -m benchmarks.speed.install --before REV   # ... and `make setup` of another revision, which had the demo
    python -m benchmarks.speed.install --trains       # also one short training with what the demo installs

Each is made in a clone of its own and without pip's cache, in turn, and deleted again.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from typing import NamedTuple

from benchmarks.shared.paths import ROOT

DEADLINE_S = 1200.0
SHORT = ("train.steps=1", "sft=null", "eval=null")


class Installed(NamedTuple):
    seconds: float
    megabytes: float


def install(revision: str, target: str, *, trains: bool = False) -> Installed:
    """Runs `make TARGET` in a new clone at the revision."""
    with tempfile.TemporaryDirectory(prefix="art-install-") as place:
        _run(["git", "clone", "--no-checkout", str(ROOT), place], place)
        _run(["git", "checkout", revision], place)
        begin = time.perf_counter()
        _run(["make", target], place)
        seconds = time.perf_counter() - begin
        if trains:
            _run([".venv/bin/art", "train", "recipes/tictactoe/config.yaml", *SHORT], place)
        size = subprocess.run(["du", "-sm", ".venv"], cwd=place, capture_output=True, text=True, check=True)
        return Installed(seconds, float(size.stdout.split()[0]))


def _run(command: list[str], place: str) -> None:
    known = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
    done = subprocess.run(
        command, cwd=place, env={**known, "PIP_NO_CACHE_DIR": "1"}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="REV", help="a revision whose `make setup` installed for the demo")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--trains", action="store_true")
    options = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    revision = head.stdout.strip()
    sides = {"tests (make setup)": (revision, "setup"), "demo (make setup-demo)": (revision, "setup-demo")}
    if options.before is not None:
        sides = {f"before ({options.before})": (options.before, "setup"), **sides}
    found: dict[str, list[Installed]] = {name: [] for name in sides}
    for _ in range(options.runs):
        for name, (revision, target) in sides.items():
            found[name].append(install(revision, target, trains=options.trains and target == "setup-demo"))
    first, *_ = found
    print("| | seconds | MB | of the first: seconds | MB |\n|---|---|---|---|---|")
    base = _medians(found[first])
    for name, each in found.items():
        mine = _medians(each)
        shares = f"{mine.seconds / base.seconds:.0%} | {mine.megabytes / base.megabytes:.0%}"
        print(f"| {name} | {mine.seconds:.0f} | {mine.megabytes:.0f} | {shares} |")


def _medians(each: list[Installed]) -> Installed:
    return Installed(statistics.median(one.seconds for one in each), statistics.median(one.megabytes for one in each))


if __name__ == "__main__":
    main()
