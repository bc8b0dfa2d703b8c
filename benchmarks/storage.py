"""What keeping a run in an object store costs a step: trainings with and without one, in turn.

    python -m benchmarks.storage                # about two minutes; make setup-s3 first, for a real S3 server (moto)

Each pair trains the letters task twice, once with `store`, once without; which comes first changes from pair to pair. A
run's time of a step is the median over its steps but the first, from the times in metrics.jsonl; the ratio is the
median over the pairs. Uploads go to a server of S3 in a process of its own on this machine, so the server's work is in
the ratio too. `bytes` is what one step uploads: a checkpoint, its step's records, and files that grew.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import load_config
from art_cli.loop.train import train
from art_cli.run_dir import RunDir
from art_cli.storage import mirror
from art_cli.storage.uploads import Uploads
from tests.support.paths import LETTERS
from tests.support.real_s3 import IS_THERE, SDK, environment, s3_server

STEPS = 8
SETTINGS = ["eval=null", f"train.steps={STEPS}", "rollout.group_size=8", "rollout.groups_per_step=8",
            "train.keep_checkpoints=2"]  # fmt: skip


class Measured(NamedTuple):
    """One training."""

    step_s: float
    bytes_per_step: float


def measure(place: Path, store: str | None) -> Measured:
    made: list[Uploads] = []

    class Counted(Uploads):
        def look(self) -> None:
            made.append(self)
            super().look()

    mirror.Uploads = Counted  # type: ignore[misc]
    words = [f"runs={place}", *SETTINGS] + ([f"store={store}"] if store is not None else [])
    root = asyncio.run(train(load_config(LETTERS / "config.yaml", words))).root
    times = [line.time for line in RunDir(root).metrics() if line.split == "train"]
    took = [after - before for before, after in zip(times, times[1:], strict=False)]
    return Measured(statistics.median(took), sum(each.num_bytes for each in made) / STEPS)


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
        ratios, with_store = [], []
        for pair in range(pairs):
            stores = [None, f"s3://bucket/{pair}"]
            found = {store: measure(Path(directory, f"{pair}-{store is None}"), store)
                     for store in (stores if pair % 2 else stores[::-1])}  # fmt: skip
            plain, kept = found[None], found[stores[1]]
            with_store.append(kept)
            ratios.append(kept.step_s / plain.step_s)
            print(f"pair {pair}: {plain.step_s:.3f} s a step without, {kept.step_s:.3f} s with", file=sys.stderr)
    uploaded = statistics.median(each.bytes_per_step for each in with_store)
    print("| ratio of a step's time, with a store to without (median, lowest, highest) | uploaded per step |")
    print("|---|---|")
    shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})"
    print(f"| {shown}, {pairs} pairs | {uploaded / 1e3:.0f} kB |")


if __name__ == "__main__":
    main()
