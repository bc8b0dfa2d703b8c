"""How long `art train` takes to its first reply, and how much of that is its own time.

    python -m benchmarks.speed.startup                  # the demo without its warm-up, at the last commit
    python -m benchmarks.speed.startup --before REV     # ... and at another revision, in turn

Own time is the time from the start of the process without what a bare Python takes to import the same modules of torch
and transformers. The log's own clock says what the start consisted of. Revisions without that line are compared by the
end of their first attempt, which is on the disk.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.shared.paths import ROOT

CONFIG = "recipes/tictactoe/config.yaml"
SHORT = ("train.steps=1", "sft=null", "eval=null")
LIBRARIES = ("torch", "transformers")
DEADLINE_S = 300.0
IMPORTED = re.compile(r"import time: +\d+ \| +\d+ \| +(\S+)$", re.MULTILINE)
LINE = re.compile(r"first reply after ([\d.]+) s: (.*)")


class Start(NamedTuple):
    """Seconds after the start of the process."""

    attempt: float  # until the first attempt had ended
    reply: float | None  # until the first reply, by the log; None: the revision does not log it
    parts: dict[str, float]


def measure(checkout: Path) -> Start:
    """One short training of a checkout's code with this Python's packages."""
    with tempfile.TemporaryDirectory(prefix="art-startup-") as place:
        begin = time.time()
        _run(["-m", "art_cli", "train", CONFIG, *SHORT, f"runs={place}"], checkout)
        run = Path(place) / "tictactoe"
        lines = (run / "step_0000/trajectories.jsonl").read_bytes().splitlines()
        attempts = [msgspec.json.decode(line) for line in lines]
        attempt = min(each["started_at"] + each["duration_s"] for each in attempts) - begin
        texts = "".join(path.read_text() for path in (run / "logs").glob("*.log"))
    found = LINE.search(texts)
    if found is None:
        return Start(attempt, None, {})
    parts = dict(part.rsplit(" ", 1) for part in found[2].split(", "))
    return Start(attempt, float(found[1]), {name: float(seconds) for name, seconds in parts.items()})


def modules(checkout: Path) -> list[str]:
    """The modules of the libraries that a training imports, in order."""
    with tempfile.TemporaryDirectory(prefix="art-startup-") as place:
        told = _run(["-X", "importtime", "-m", "art_cli", "train", CONFIG, *SHORT, f"runs={place}"], checkout)
    return [name for name in IMPORTED.findall(told) if name.split(".")[0] in LIBRARIES]


def import_alone(names: list[str]) -> float:
    """Seconds in which a bare Python starts and imports the modules."""
    program = (
        "import contextlib\nfrom importlib import import_module\n"
        f"for name in {names!r}:\n    with contextlib.suppress(ImportError):\n        import_module(name)\n"
    )  # a library tries modules that are not there, too
    begin = time.perf_counter()
    _run(["-c", program], ROOT)
    return time.perf_counter() - begin


def _run(arguments: list[str], checkout: Path) -> str:
    """What Python prints to standard error."""
    known = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=known, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="REV")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-before-") as place:
        sides = {"now": ROOT}
        if options.before is not None:
            subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, place], check=True)
            subprocess.run(["git", "-C", place, "checkout", "--quiet", options.before], check=True)
            sides = {f"before ({options.before})": Path(place), **sides}
        names = modules(ROOT)
        found: dict[str, list[Start]] = {side: [] for side in sides}
        imports = []
        for _ in range(options.runs):
            imports.append(import_alone(names))
            for side, checkout in sides.items():
                found[side].append(measure(checkout))
    _show(found, statistics.median(imports), len(names))


def _show(found: dict[str, list[Start]], imports: float, num_modules: int) -> None:
    runs = len(next(iter(found.values())))
    told = f"A bare Python imports the {num_modules} modules of torch and transformers in {imports:.2f} s."
    print(f"Medians of {runs}. {told}")
    print("\n| | first attempt ended, s | own time, s | first reply, s | own time, s |\n|---|---|---|---|---|")
    for side, starts in found.items():
        attempt = statistics.median(start.attempt for start in starts)
        replies = [start.reply for start in starts if start.reply is not None]
        row = f"| {side} | {attempt:.2f} | {attempt - imports:.2f} |"
        print(row + (f" {(r := statistics.median(replies)):.2f} | {r - imports:.2f} |" if replies else " | |"))
    last = next(reversed(found.values()))
    print("\n| part of the start | s |\n|---|---|")
    for name in last[0].parts:
        print(f"| {name} | {statistics.median(start.parts[name] for start in last):.2f} |")


if __name__ == "__main__":
    main()
