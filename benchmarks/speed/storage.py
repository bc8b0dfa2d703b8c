"""What keeping a run in an object store costs a step: trainings with and without one, in turn.

    python -m benchmarks.speed.storage   # about five minutes; make setup-s3 first, for a real S3 server (moto)

Each pair trains the letters task twice, once with `store`, once without; which comes first changes from pair to pair. A
run's time of a step is the mean over its steps but the first, because uploads are spaced over several steps; the ratio
is the median over the pairs. Uploads go to a server of S3 in a process of its own on this machine, so the server's work
is in the ratio of times; processor seconds are those of the training's process alone, its uploads included. What a step
uploads is a checkpoint, its step's records, and files that grew.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import load_config
from art_cli.loop import claim_run
from art_cli.loop.train import train
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.storage import mirror
from art_cli.runs.storage.uploads import Uploads
from tests.support.others.real_s3 import IS_THERE, SDK, environment, s3_server
from tests.support.paths import LETTERS

STEPS = 16
SETTINGS = ["eval=null", f"train.steps={STEPS}", "rollout.group_size=8", "rollout.groups_per_step=8",
            "train.keep_checkpoints=2"]  # fmt: skip


class Measured(NamedTuple):
    """One training."""

    step_s: float
    cpu_s: float  # processor seconds of the training's process per step
    bytes_per_step: float


def measure(place: Path, store: str | None) -> Measured:
    made: list[Uploads] = []

    class Counted(Uploads):
        def look(self) -> None:
            made.append(self)
            super().look()

    ends: list[tuple[float, float]] = []  # (time, processor seconds) at the end of each step

    class Timed(RunDir):
        def append_metrics(self, step: int, split: str, metrics: dict[str, float], policy: str = "") -> MetricsLine:
            if split == "train":
                ends.append((time.perf_counter(), time.process_time()))
            return super().append_metrics(step, split, metrics, policy)

    mirror.Uploads = Counted  # type: ignore[misc]
    claim_run.RunDir = Timed  # type: ignore[misc]
    words = [f"runs={place}", *SETTINGS] + ([f"store={store}"] if store is not None else [])
    asyncio.run(train(load_config(LETTERS / "config.yaml", words)))
    step_s, cpu_s = [(last - first) / (STEPS - 1) for first, last in zip(ends[0], ends[-1], strict=True)]
    return Measured(step_s, cpu_s, sum(each.num_bytes for each in made) / STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    if not IS_THERE:
        raise SystemExit("make setup-s3 first")
    sys.path.insert(0, str(SDK))
    with s3_server() as url, tempfile.TemporaryDirectory() as directory:
        os.environ.update({name: value for name, value in environment(url).items() if name.startswith("AWS_")})
        measure(Path(directory, "warm"), None)
        pairs_found: list[tuple[Measured, Measured]] = []
        for pair in range(pairs):
            stores = [None, f"s3://bucket/{pair}"]
            found = {store: measure(Path(directory, f"{pair}-{store is None}"), store)
                     for store in (stores if pair % 2 else stores[::-1])}  # fmt: skip
            plain, kept = found[None], found[stores[1]]
            pairs_found.append((plain, kept))
            print(f"pair {pair}: {plain.step_s:.3f} s ({plain.cpu_s:.3f} s of processor) a step without, "
                  f"{kept.step_s:.3f} s ({kept.cpu_s:.3f} s) with", file=sys.stderr)  # fmt: skip
    uploaded = statistics.median(kept.bytes_per_step for _, kept in pairs_found)
    print(f"| of {pairs} pairs: median (lowest, highest) | with a store, to without |")
    print("|---|---|")
    print(f"| a step's time | {shown([kept.step_s / plain.step_s for plain, kept in pairs_found])} |")
    print(f"| processor seconds of the training | {shown([kept.cpu_s / plain.cpu_s for plain, kept in pairs_found])} |")
    print(f"| uploaded per step | {uploaded / 1e3:.0f} kB |")


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})"


if __name__ == "__main__":
    main()
