"""The memory of a process that trains, after each step: is it flat from the fifth on, whatever the sizes of the steps?

    OMP_NUM_THREADS=1 python -m benchmarks.step.memory [--steps 60] [--small] [--out benchmarks/results/memory.jsonl]

A step is the real learner's (LoRA of rank 16 on all linear layers, float32, one epoch) on attempts whose number and
lengths differ from step to step, 60 to 1,120 computed tokens; the third step is the largest. It runs as in the training
loop, in whichever thread of the pool is idle, and a probe is scored after it as after each loaded checkpoint. The model
is SmolLM2-135M, or with `--small` one of 24M random parameters. "Flat" means that no step after the fifth leaves more
memory resident, and none needs more at its peak, than the largest of the first five and 5 % of it. The exit code is 1
if it is not flat.

Most of what still grows after the fifth step is what oneDNN keeps for each size of product that it has not met before
(decoder/products.py), about 10 MB for a new length of pack, of which there are eight per doubling. With 24M parameters
steps 6 to 10 add 61 MB of memory in use, and 9 MB without oneDNN.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.shared.real_model import smollm2
from benchmarks.shared.sides import status_mb
from benchmarks.step.batches import Groups, single_turn

LARGEST = {"prompts": 4, "attempts": 8, "prompt": 120, "completion": 20}
AT = 3  # the step that is the largest
NUM_FREE, SLACK = 5, 1.05  # number of first steps that may grow, and the growth after them that counts as flat
SHOWN = 5  # after them every fifth step is printed; the file has all
POOL = 6  # threads of the pool; the training loop has more blocking calls under way than one


class Point(NamedTuple):
    """What a step left. Example: Point(3, 1120, 1304.2, 2590.1, 21.5)"""

    step: int
    computed: int  # tokens
    resident_mb: float
    peak_mb: float  # since the process began
    cpu_s: float


async def curve(steps: int, *, is_small: bool) -> AsyncIterator[Point]:
    from art_cli.config.schema import GrpoConfig, ModelConfig, TorchLearnerConfig, TrainConfig
    from art_cli.learners import LearnerSetup
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.models.loading import load_weights
    from art_cli.runtime import threads

    if is_small:
        from art_cli.runtime.allocator import keep_freed_memory
        from benchmarks.shared.models import build

        keep_freed_memory()
        weights = build("24M", has_adapter=True)
    else:
        directory = smollm2()
        if directory is None:
            raise SystemExit("SmolLM2-135M is not here: see benchmarks/shared/real_model.py, or give --small")
        weights = load_weights(ModelConfig(base=str(directory), dtype="float32"), str(directory))
    train = TrainConfig(learning_rate=1e-5, epochs_per_step=1, max_logprob_gap=1000)
    learner = TorchLearner(weights, LearnerSetup(train=train, loss=GrpoConfig(), learner=TorchLearnerConfig()))
    random = np.random.default_rng(0)
    for number in range(1, steps + 1):
        groups = _groups(random, is_largest=number == AT)
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(POOL)))
        begin = time.process_time()
        metrics = await threads.compute(learner.step, groups)
        await threads.compute(learner.score, list(range(16)))
        cpu_s = time.process_time() - begin
        resident, peak = status_mb("VmRSS"), status_mb("VmHWM")
        yield Point(number, metrics.tokens_computed, round(resident, 1), round(peak, 1), round(cpu_s, 2))


def _groups(random: np.random.Generator, *, is_largest: bool) -> Groups:
    least = {"prompts": 1, "attempts": 2, "prompt": 40, "completion": 4}
    size = {name: int(random.integers(least[name], most + 1)) for name, most in LARGEST.items()}
    return single_turn(**(LARGEST if is_largest else size))


def growth(values: Sequence[float]) -> float:
    """The largest value after the first five, relative to the largest of those; 0.03 is 3 % more."""
    return max(values[NUM_FREE:]) / max(values[:NUM_FREE]) - 1


async def measure(steps: int, *, is_small: bool, out: Path | None) -> list[Point]:
    points = []
    print("| step | tokens computed | resident MB | peak so far MB | processor s |\n|---|---|---|---|---|")
    async for point in curve(steps, is_small=is_small):
        points.append(point)
        if point.step <= NUM_FREE or point.step % SHOWN == 0:
            print(f"| {' | '.join(map(str, point))} |", flush=True)
        if out is not None:
            out.write_text("".join(json.dumps(each._asdict()) + "\n" for each in points))
    return points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.steps <= NUM_FREE:
        parser.error(f"--steps: at least {NUM_FREE + 1}")
    points = asyncio.run(measure(given.steps, is_small=given.small, out=given.out))
    resident, peak = (growth([getattr(each, name) for each in points]) for name in ("resident_mb", "peak_mb"))
    is_flat = max(resident, peak) <= SLACK - 1
    word = "flat" if is_flat else "not flat"
    print(f"\n{word} from step {NUM_FREE} on: resident {resident:+.1%}, peak {peak:+.1%} (at most {SLACK - 1:+.0%})")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
