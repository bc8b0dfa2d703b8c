"""How much longer the demo takes on a busy machine than on an idle one.

    python -m benchmarks.speed.busy                                    # idle, then beside three busy processes, in turn
    python -m benchmarks.speed.busy --steps 24 --repeats 1             # the whole demo
    python -m benchmarks.speed.busy --variant OMP_WAIT_POLICY=PASSIVE  # the same with another environment beside it

Each run is `art train` of the tic-tac-toe recipe in a directory of its own: model, warm-up, and a few steps. It prints
medians of the whole command's seconds and of its warm-up's and training's parts, and busy over idle. A fair scheduler
alone gives a program with one thread half a core beside three busy processes on two cores, so twice the time.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared.paths import ROOT

RECIPE = ROOT / "recipes" / "tictactoe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=3, help="busy processes beside the demo")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=VALUE", help="environment to compare")
    options = parser.parse_args()
    variants = ["", *options.variant]
    taken: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for variant in variants:
            for is_busy in (False, True):
                with busy_processes(options.busy if is_busy else 0):
                    taken.setdefault((variant, is_busy), []).append(train(variant, options.steps))
    print(f"{'environment':33s} idle: whole  warm-up  train  sample   busy: whole  warm-up  train  sample   ratio")
    for variant in variants:
        idle, busy = ([medians(taken[variant, is_busy])] for is_busy in (False, True))
        cells = "   ".join(
            f"{row['whole']:11.1f} {row['warm_up']:8.1f} {row['train']:6.1f} {row['sample']:7.1f}"
            for row in (*idle, *busy)
        )
        print(f"{variant or 'as it is':33s} {cells}   {busy[0]['whole'] / idle[0]['whole']:.2f}")


def train(variant: str, steps: int) -> dict[str, float]:
    """Seconds of one run: the whole command, its warm-up, the updates and the sampling of its steps."""
    name, _, value = variant.partition("=")
    environment = {**os.environ, **({name: value} if variant else {})}
    with tempfile.TemporaryDirectory(prefix="art-busy-") as directory:
        shutil.copytree(RECIPE, directory, dirs_exist_ok=True)
        command = [sys.executable, "-m", "art_cli", "train", "config.yaml", f"train.steps={steps}", "eval.every=1000"]
        begin = time.perf_counter()
        subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
        whole = time.perf_counter() - begin
        lines = (Path(directory) / "runs" / "tictactoe" / "metrics.jsonl").read_text().splitlines()
    metrics = [line["metrics"] | {"split": line["split"]} for line in map(json.loads, lines)]
    warm_up = sum(line["train_s"] for line in metrics if line["split"] == "sft")
    updates = [line for line in metrics if line["split"] == "train"]
    parts = {name: sum(line[f"{name}_s"] for line in updates) for name in ("train", "sample")}
    return {"whole": whole, "warm_up": warm_up, **parts}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
