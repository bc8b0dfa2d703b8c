"""What a server of the Tinker protocol costs: `art train` through `art backend` on this machine, against local.

    python -m benchmarks.speed.remote                 # the demo and the letters task, two rounds of 7 steps each
    python -m benchmarks.speed.remote --task demo --steps 11

Both sides play the same task whole: engine, learner, checkpoint, proof. They take turns, and seconds per step are
medians over the steps of all rounds, without each round's first step. Processor seconds are those of the client, its
children and the server together, start and warm-up included. Then both take two steps on the same scored trajectories,
each from its own start, after its own warm-up, and their weights are compared.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from art_cli.runs.run_dir import RunDir
from benchmarks.shared.commands import processor_seconds_of
from benchmarks.shared.paths import ROOT

DEADLINE_S = 420.0
LOCAL = ("engine=embedded", "learner=torch")
ROUNDS = 2


class Task(NamedTuple):
    """A configuration and what is measured with it."""

    config: Path
    settings: tuple[str, ...]
    presets: tuple[str, ...]  # losses whose weights are compared


TASKS = {
    "demo": Task(ROOT / "recipes/tictactoe/config-groups.yaml", (), ("grpo",)),
    "letters": Task(
        ROOT / "tests/letters/config.yaml",
        (
            "rollout.groups_per_step=8",
            "rollout.group_size=8",
            "rollout.sampling.max_tokens=24",
            "train.epochs_per_step=4",
        ),
        ("grpo", "cispo", "rloo"),
    ),
}


class Sides(NamedTuple):
    """Where both sides of a task run: the arguments that choose local or the server."""

    task: Task
    home: Path
    chosen: dict[str, tuple[str, ...]]
    steps: int

    def art(self, side: str, command: str, *words: str) -> float:
        """Processor seconds of the command and its children. Raises SystemExit: it failed."""
        settings = (*self.task.settings, f"train.steps={self.steps}", "eval=null", "model.dtype=float32")
        line = [sys.executable, "-m", "art_cli", command, str(self.task.config), *words, *settings, *self.chosen[side]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise SystemExit(f"art {command} ({side}): {done.stderr[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def times(self, side: str, number: int) -> list[float]:
        """Seconds between the metrics lines of a round's steps, the first left out."""
        moments = [line.time for line in self.run(side, number).metrics() if line.split == "train"]
        return [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]

    def run(self, side: str, number: int) -> RunDir:
        return RunDir(self.home / side / f"round{number}")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def largest_gap(left: Path, right: Path) -> tuple[float, int, int]:
    """The largest difference of a weight in two checkpoints, how many differ, and how many there are."""
    from safetensors.numpy import load_file

    from art_cli.tinker.client.remote_checkpoint import fetched

    found = []
    for path in map(fetched, (left, right)):
        adapter = path / "adapter_model.safetensors"
        found.append(load_file(adapter if adapter.is_file() else path / "model.safetensors"))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    gaps = [abs(ours[name] - theirs[name]) for name in ours]
    return max(float(gap.max()) for gap in gaps), sum(int((gap > 0).sum()) for gap in gaps), sum(g.size for g in gaps)


def measure(name: str, sides: Sides, server: int) -> None:
    times: dict[str, list[float]] = {side: [] for side in sides.chosen}
    spent = dict.fromkeys(sides.chosen, 0.0)
    for number in range(ROUNDS):
        for side in sides.chosen:
            before = processor_seconds_of(server)
            spent[side] += sides.art(side, "train", f"name=round{number}", f"runs={sides.home / side}")
            spent[side] += processor_seconds_of(server) - before
            times[side] += sides.times(side, number)
    local, remote = (statistics.median(times[side]) for side in ("local", "remote"))
    print(f"{name}: {len(times['local'])} steps of 64 attempts on each side, load {os.getloadavg()[0]:.1f}")
    print(f"  seconds per step, median      local {local:.3f}   remote {remote:.3f}   ratio {remote / local:.2f}")
    least, most = (min(times["local"]), min(times["remote"]))
    print(f"  seconds per step, least       local {least:.3f}   remote {most:.3f}   ratio {most / least:.2f}")
    local, remote = spent["local"], spent["remote"]
    print(f"  processor seconds, all runs   local {local:.1f}   remote {remote:.1f}   ratio {remote / local:.2f}")


def compare(sides: Sides) -> None:
    print("  largest difference of a weight after two steps on the same trajectories, same seed:")
    for preset in sides.task.presets:
        found = []
        for side in sides.chosen:
            # each side's own start, after its own warm-up where the task has one
            before = ["--checkpoint", str(sides.run(side, 0).checkpoint_path(0))]
            for step in range(2):
                out = sides.home / f"{preset}-{side}-{step}"
                scored = sides.run("local", 0).scored_path(step)
                only = ["name=none", f"runs={sides.home}/none", f"loss={preset}", "train.max_logprob_gap=10"]
                sides.art(side, "step", str(scored), *only, *before, "-o", str(out))
                before = ["--checkpoint", str(out)]
            found.append(out)
        gap, num, total = largest_gap(*found)
        print(f"    {preset:8s} {gap:.1e}   {num} of {total} values differ")


@contextmanager
def serving(task: Task, home: Path) -> Iterator[tuple[str, int]]:
    """Yields the address of an `art backend` of the task, and its process id."""
    command = [sys.executable, "-m", "art_cli", "backend", str(task.config), "--port", "0", "--checkpoints"]
    with (home / "backend.log").open("w") as log:
        server = subprocess.Popen(
            [*command, str(home / "backend"), "model.dtype=float32"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None, "art backend did not start"
        yield found[0], server.pid
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--task", choices=sorted(TASKS), action="append")
    options = parser.parse_args()
    for name in options.task or TASKS:
        with tempfile.TemporaryDirectory(prefix="art-remote-") as place:
            home = Path(place)
            with serving(TASKS[name], home) as (address, pid):
                remote = ("engine=tinker", "learner=tinker", f"engine.base_url={address}")
                sides = Sides(TASKS[name], home, {"local": LOCAL, "remote": remote}, options.steps)
                measure(name, sides, pid)
                compare(sides)


if __name__ == "__main__":
    main()
