"""What a server of the Tinker protocol costs: the letters task through `art backend` on this machine, against local.

python -m benchmarks.remote

Both take the same steps on the same scored trajectories, and both play the same task whole: engine, learner,
checkpoint, proof. Seconds per step are medians of the steps of one run each, without each run's first step.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from art_cli.run_dir import RunDir

LETTERS = Path(__file__).parents[1] / "tests/letters/config.yaml"
SIZE = [
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "rollout.sampling.max_tokens=24",
    "train.epochs_per_step=4",
]
PRESETS = ("grpo", "dapo", "cispo", "rloo")
DEADLINE_S = 240.0


def art(*words: str) -> str:
    """What the command prints. Raises CalledProcessError."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "art_cli", *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise SystemExit(f"art {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def times_of(run: Path) -> list[float]:
    """Seconds between the metrics lines of a run's steps, the first left out."""
    moments = [line.time for line in RunDir(run).metrics() if line.split == "train"]
    return [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]


def largest_gap(left: Path, right: Path) -> float:
    """The largest difference of a number in two checkpoints' adapters."""
    from safetensors.numpy import load_file

    from art_cli.remote.checkpoint import fetched

    ours, theirs = (load_file(fetched(path) / "adapter_model.safetensors") for path in (left, right))
    assert ours.keys() == theirs.keys()
    return max(float(abs(ours[name] - theirs[name]).max()) for name in ours)


def measure(home: Path, address: str, steps: int) -> None:
    remote = ["engine=tinker", "learner=tinker", f"engine.url={address}"]
    settings = [*SIZE, f"train.steps={steps}", "eval=null", "model.dtype=float32"]
    runs = {"local": home / "local", "remote": home / "remote"}
    for name, place in runs.items():
        chosen = remote if name == "remote" else ["engine=embedded", "learner=torch"]
        art("train", str(LETTERS), *settings, *chosen, f"runs={place}")
    medians = {name: statistics.median(times_of(place / "letters")) for name, place in runs.items()}
    print(f"seconds per step, medians of {steps - 1} steps of {8 * 8} attempts:")
    print(f"  local {medians['local']:.3f}   remote {medians['remote']:.3f}   ", end="")
    print(f"ratio {medians['remote'] / medians['local']:.2f}")
    print("largest difference of adapters after two steps on the same scored trajectories, same seed:")
    for preset in PRESETS:
        found = []
        for name, chosen in (("local", ["engine=embedded", "learner=torch"]), ("remote", remote)):
            before = []
            for step in range(2):
                out = home / f"{preset}-{name}-{step}"
                scored = RunDir(runs["local"] / "letters").scored_path(step)
                only = ["name=none", f"runs={home}/none", f"loss={preset}", "train.max_logprob_gap=10"]
                art("step", str(LETTERS), str(scored), *settings, *chosen, *only, *before, "-o", str(out))
                before = ["--checkpoint", str(out)]
            found.append(out)
        print(f"  {preset:8s} {largest_gap(*found):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=11)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="art-remote-") as place:
        home = Path(place)
        command = [sys.executable, "-m", "art_cli", "backend", str(LETTERS), "--port", "0", "--checkpoints"]
        server = subprocess.Popen(
            [*command, str(home / "backend"), "model.dtype=float32"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None, "art backend did not start"
            measure(home, found[0], steps)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
