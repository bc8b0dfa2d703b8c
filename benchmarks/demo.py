"""The main job, measured: trains recipes/tictactoe from nothing for several seeds and says how far each came.

    python benchmarks/demo.py                     # seeds 0 1 2, about 15 minutes on 2 cores
    python benchmarks/demo.py --seeds 0 --out x   # one seed, run directory kept under x

For each seed: win rate over the fixed evaluation games at the start and at the end, the rise with its 95 % interval,
the seconds of the whole `art train` and its parts, and the win rate of the final checkpoint, loaded afresh by
`art eval`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from art_cli.loop.evaluate import paired_difference, values_by_scenario
from art_cli.run_dir import RunDir, read_lines
from art_cli.trajectory import Trajectory

CONFIG = Path(__file__).parent.parent / "recipes" / "tictactoe" / "config.yaml"
ART = [sys.executable, "-m", "art_cli"]


def measure(seed: int, runs: Path) -> dict[str, Any]:
    """Trains one seed in a process of its own and reads what it left."""
    settings = [f"train.seed={seed}", f"name=seed-{seed}", f"runs={runs}"]
    begin = time.perf_counter()
    subprocess.run([*ART, "train", str(CONFIG), *settings], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    run = RunDir(runs / f"seed-{seed}")
    evaluated = sorted(line.step for line in run.metrics() if line.split == "eval")
    wins = [values_by_scenario(list(read_lines(run.eval_path(s), Trajectory)))["win"] for s in evaluated]
    rise = paired_difference(wins[-1], wins[0])
    assert rise is not None
    served = subprocess.run(
        [*ART, "eval", str(CONFIG), *settings, "--checkpoint", str(run.root), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    train = [line.metrics for line in run.metrics() if line.split == "train"]
    return {
        "seed": seed,
        "games": len(wins[0]),
        "start": sum(wins[0].values()) / len(wins[0]),
        "end": sum(wins[-1].values()) / len(wins[-1]),
        "rise": rise._asdict(),
        "served": next(row["mean"] for row in json.loads(served.stdout) if row["metric"] == "win"),
        "steps": len(train),
        "seconds": seconds,
        "sample_s": sum(line["sample_s"] for line in train),
        "train_s": sum(line["train_s"] for line in train),
        "logprob_gap": max(line.get("logprob_gap", 0.0) for line in train),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="keep the run directories here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-demo-") as scratch:
        rows = [measure(seed, (options.out or Path(scratch)).resolve()) for seed in options.seeds]
    print(
        "seed  games  wins at start  wins at end  rise [95 %]            served  "
        "steps  seconds (sampling, training)  gap"
    )
    for row in rows:
        rise = row["rise"]
        print(
            f"{row['seed']:4d}  {row['games']:5d}  {row['start']:13.3f}  {row['end']:11.3f}  "
            f"{rise['mean']:+.3f} [{rise['low']:+.3f}, {rise['high']:+.3f}]  {row['served']:6.3f}  {row['steps']:5d}  "
            f"{row['seconds']:7.1f} ({row['sample_s']:.1f}, {row['train_s']:.1f})  {row['logprob_gap']:.1e}"
        )


if __name__ == "__main__":
    main()
