"""A learner's whole step at real sizes on a GPU that is not there: waits, mix-ups of devices, bytes.

    python -m benchmarks.forecasts.fake_device [name ...] [--tokens 8192] [--layers n]  one process per model

Each model is made without its numbers (tests/support/standins/fake_device.py) and takes steps on made-up rows, as `art
check` and `art plan` do: scores, forward, loss, backward, clip, AdamW. For each it prints

    weights    GB of the policy before the first step
    kept       MB a token that a pass keeps for its backward pass
    predicted  GB of the peak of a step on a row of `tokens`, as `art plan` and `art check` estimate it from short rows
    counted    GB of that step's peak, all tensors of the device, and their difference
    waits      times that the host waits for the device in that step, which has one pack

A row in 4 bits needs bitsandbytes: PYTHONPATH=.venv/quantize. The estimates are those of ESTIMATES, by name.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from art_cli.config.schema import GrpoConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.learners.packs.flex_attention import FlexAttention
from art_cli.learners.packs.pack_runner import MICRO_BATCH_TOKENS
from art_cli.learners.samples import bare_sample
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop import trial_update
from art_cli.models.weights import Weights
from benchmarks.forecasts.published import published
from tests.support.standins.fake_device import NAME, FakeDevice, fake_weights, fused

BUDGET = MICRO_BATCH_TOKENS["cuda"]


class Case(NamedTuple):
    base: str
    is_4bit: bool = False


CASES = {
    **{
        name: Case(name)
        for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen2.5-1.5B", "Llama-3.1-8B", "Gemma-3-4B")
    },
    "Qwen3-8B-4bit": Case("Qwen3-8B", is_4bit=True),
}


class Bench(NamedTuple):
    """A learner on the fake device. Use inside `opened`."""

    device: FakeDevice
    weights: Weights
    learner: TorchLearner

    def step(self, tokens: int) -> "Counted":
        """Takes a step on two equal attempts of that many tokens, which are one pack."""
        self.device.forget()
        begin = time.perf_counter()
        metrics = trial_update.step(self.learner, tokens, vocabulary=self.weights.vocabulary)
        assert metrics.num_updates > 0
        return Counted(self.device.peak, self.device.peak_at, self.device.waits.copy(), time.perf_counter() - begin)

    def kept(self, tokens: int) -> int:
        """Returns the bytes that a pass over a row keeps for its backward pass."""
        runner = self.learner.runner
        sample = bare_sample(np.zeros(tokens, dtype=np.int64), np.arange(1, tokens), "row", temperature=1.0)
        with runner.running():
            [pack] = runner.pack([sample])
            before = self.device.now
            scores = runner.run(pack)
            found = self.device.now - before
        del scores
        return found

    def kept_per_token(self, tokens: int) -> float:
        """Returns the bytes for each token, those of a pass apart that do not grow with the row."""
        return (self.kept(2 * tokens) - self.kept(tokens)) / tokens

    def forecast(self, tokens: int) -> float:
        """Returns the bytes of a step's peak as `art plan` estimates them: `Pilot.memory` calls this."""

        ours = {"forget_peak": lambda _: self.device.forget(), "peak": lambda _: self.device.peak / 1e9}
        with ExitStack() as stack:
            for name, function in ours.items():
                for own in {name, f"_{name}"} & vars(trial_update).keys():
                    stack.enter_context(mock.patch.object(trial_update, own, function))
            short = min(tokens // 2, trial_update.MIN_SECOND)
            cost = trial_update.forecast(
                self.learner, self.weights, short, tokens, most_tokens=trial_update.MAX_TOKENS, most_gb=80.0
            )
        assert cost.gigabytes is not None
        return cost.gigabytes * 1e9


class Counted(NamedTuple):
    """Example: Counted(4_100_000_000, "decoder/maths.py:gate_backward", Counter({"x.py:clip item": 1}), 12.5)"""

    peak: int  # bytes
    peak_at: str  # function of ours that ran at the peak
    waits: Counter[str]
    seconds: float


# Each returns the bytes of a step's peak on a row of so many tokens, by the learner after its first step.
ESTIMATES: dict[str, Callable[[Bench, int], float]] = {"two rows": Bench.forecast}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, the device has what our tables by device have for "cuda"."""
    modules = [module for name, module in sys.modules.items() if name.startswith("art_cli.")]
    tables = [each for module in modules for each in vars(module).values() if isinstance(each, dict) and "cuda" in each]
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(mock.patch.dict(table, {NAME: table["cuda"]}))
        yield


@contextmanager
def opened(name: str, *, layers: int | None = None, **knobs: Any) -> Iterator[Bench]:
    """Opens a learner as on a GPU, for that model or its first layers. `knobs` are the learner's settings."""
    case = CASES[name]
    with FakeDevice() as device, as_on_a_gpu():
        config = published(case.base, layers=layers)
        weights = fake_weights(config, device, is_4bit=case.is_4bit)
        settings = TorchLearnerConfig(**{"micro_batch_tokens": BUDGET, **knobs})
        learner = TorchLearner(
            weights,
            LearnerSetup(train=TrainConfig(learning_rate=1e-5, max_kl=0.05), loss=GrpoConfig(), learner=settings),
        )
        learner.runner.flex = FlexAttention(BUDGET, fused)
        yield Bench(device, weights, learner)


def line(name: str, *, tokens: int, layers: int | None) -> str:
    begin = time.perf_counter()
    with opened(name, layers=layers) as bench:
        weights = bench.device.now
        bench.step(64)  # compares packs with plain rows and makes AdamW's moments
        predicted = {label: estimate(bench, tokens) for label, estimate in ESTIMATES.items()}
        counted = bench.step(tokens)
        kept = bench.kept_per_token(tokens // 2)
        numbers = [f"{label} {each / 1e9:.2f} GB ({each / counted.peak - 1:+.1%})" for label, each in predicted.items()]
        shown = [
            f"{weights / 1e9:.2f} GB",
            f"{kept / 1e6:.2f} MB",
            *numbers,
            f"{counted.peak / 1e9:.2f} GB in {counted.peak_at}",
        ]
        shown += [f"{counted.waits.total()} waits", f"{time.perf_counter() - begin:.0f} s"]
        places = [f"    {times:4d} {place}" for place, times in counted.waits.most_common()]
    return " | ".join([f"{name:14}", *shown]) + "\n" + "\n".join(places)


def main() -> None:
    parser = argparse.ArgumentParser(description="A learner's step at real sizes on a device that is not there.")
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--tokens", type=int, default=BUDGET)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    torch.manual_seed(0)
    if len(options.names) == 1:
        print(line(options.names[0], tokens=options.tokens, layers=options.layers), flush=True)
        return
    for name in options.names or CASES:
        subprocess.run([sys.executable, "-m", "benchmarks.forecasts.fake_device", name, *_rest(options)], check=False)


def _rest(options: argparse.Namespace) -> list[str]:
    layers = [] if options.layers is None else ["--layers", str(options.layers)]
    return ["--tokens", str(options.tokens), *layers]


if __name__ == "__main__":
    main()
