"""Training alone at the shapes of the whole loop: time, share of the machine and memory, against TRL's step.

    python -m benchmarks.training                          # all three shapes, median of 5
    python -m benchmarks.training --shape game --no-trl    # ours alone
    python -m benchmarks.training --threads 1              # for a machine that does other things as well

A step of each shape in benchmarks/loop_shapes.py: the same episodes (benchmarks/episodes.py), model, adapter and loss
on both sides, each in a process of its own, in turn. Ours is TorchLearner.step, from scored trajectories on. TRL's is
its training_step at its fastest micro-batch, clip and AdamW (benchmarks/trl_step.py).

The share of the machine is the operations that the step needs at least (benchmarks/operations.py) by its seconds, over
the float32 peak: the best of large products by torch.mm and by oneDNN, in the same process between the steps. The note
has it by processor seconds as well, which other programs on the machine disturb less. Memory is the peak above the
loaded model. Where the time goes: one profiled step, by kind of operation.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.batches import SETTINGS
from benchmarks.episodes import as_groups, as_recorded, play
from benchmarks.loop_shapes import SHAPES, Shape
from benchmarks.operations import Operations, step_operations, tokens_of
from benchmarks.sides import Memory, Row, Side, Taken, in_turn, median, ratio, seconds, table
from benchmarks.trl_step import TrlStep
from benchmarks.utilisation import split_of

TARGETS = {"tiny": "", "game": ">= 0.55", "agent": ">= 0.6"}
CLOCKS = (time.perf_counter, time.process_time)
SLOW_REPEATS = 3  # repetitions of TRL's steps, which take most of the time


class Batch:
    """A shape's model, with an adapter that is not zero, and the episodes of one step."""

    def __init__(self, name: str, base: Path, threads: int | None) -> None:
        import torch

        from art_cli.config.compose import load_config
        from art_cli.models.loading import load_weights

        if threads is not None:
            torch.set_num_threads(threads)
        shape = SHAPES[name]
        self.config = load_config(shape.config, [f"model.base={base}", *shape.settings]).config
        self.weights = load_weights(self.config.model, str(base), device="cpu")
        torch.manual_seed(0)
        for parameter_name, parameter in self.weights.model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.02)
        self.played = play(shape, self.config, self.weights.tokenizer)
        self.groups = as_groups(self.played)


class Ours:
    def __init__(self, name: str, base: Path, threads: int | None) -> None:
        from art_cli.learners.torch_learner import TorchLearner

        self.batch = Batch(name, base, threads)
        config = self.batch.config
        train = config.train.model_copy(update=SETTINGS)
        self.learner = TorchLearner(self.batch.weights, train=train, loss=config.loss, learner=config.learner)
        self.memory = Memory()
        self.metrics: Any = None

    def step(self) -> None:
        self.metrics = self.learner.step(self.batch.groups)

    def tokens(self) -> tuple[int, int, int]:
        """(computed, in rows, trained) of the last step."""
        return self.metrics.tokens_computed, self.metrics.tokens_flat, self.metrics.tokens_trained

    def operations(self) -> Operations:
        tokens = tokens_of(self.batch.groups, self.learner.algorithm)
        return step_operations(self.batch.weights.model, tokens)

    def memory_mb(self) -> float:
        return self.memory.peak()

    def split(self) -> dict[str, float]:
        return split_of(self.step)

    def peak(self) -> list[float]:
        """GFLOP/s of torch.mm and of oneDNN at their best of a few large products; both by processor seconds."""
        import torch

        size = 2048
        left, right = torch.randn(size, size), torch.randn(size, size)
        onednn = torch.ops.mkldnn._linear_pointwise
        products = (lambda: left @ right, lambda: onednn(left, right, None, "none", [], ""))
        return [2e-9 * size**3 / _best(product, clock) for clock in CLOCKS for product in products]


def _best(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """The shortest of a few times."""
    times = []
    for _ in range(6):
        begin = clock()
        call()
        times.append(clock() - begin)
    return min(times)


class Theirs(TrlStep):
    def __init__(self, name: str, base: Path, threads: int | None) -> None:
        from art_cli.learners.algorithms.presets import build_algorithm
        from art_cli.learners.step_samples import make_step_samples

        batch = Batch(name, base, threads)
        algorithm = build_algorithm(batch.config.loss, max_tokens=batch.config.rollout.sampling.max_tokens)
        samples = [sample for group in make_step_samples(batch.groups, algorithm).groups for sample in group]
        known = {sample.trajectory_id: float(sample.advantages[0]) for sample in samples}
        advantages = [[known.get(one.id, 0.0) for one in group] for group in batch.groups]
        size = int(SHAPES[name].trl[1])  # the first of its settings is --batch
        super().__init__(batch.weights.model, as_recorded(batch.played, advantages), size)


def build_base(shape: Shape, directory: Path) -> Path:
    """The shape's model with random weights. How well it plays changes no size here."""
    import sys

    from art_cli.models.loading import find_base

    sys.path.insert(0, str(shape.project))
    return Path(find_base(shape.build or "model.py:build", directory=shape.project, built=directory / shape.name))


def measure(name: str, base: Path, *, repeats: int, threads: int | None, has_trl: bool) -> list[Row]:
    sides = {"ours": Side(Ours, name, base, threads)}
    if has_trl:
        sides["trl"] = Side(Theirs, name, base, threads)
    for side in sides.values():
        side.call("step")
    ours = sides["ours"]
    taken: dict[str, list[Taken]] = {side: [] for side in sides}
    peaks = []
    for index in range(repeats):
        peaks.append(ours.call("peak"))
        for side, values in in_turn(sides if index < SLOW_REPEATS else {"ours": ours}, 1).items():
            taken[side] += values
    rows = _rows(name, ours, taken, peaks)
    memory = {side: sides[side].call("memory_mb" if side == "ours" else "peak") for side in sides}
    if has_trl:
        rows.append(
            Row("2", f"{name}: peak above the loaded model", f"{memory['ours']:.0f} MB", f"{memory['trl']:.0f} MB",
                round(memory["trl"] / memory["ours"], 2), ">= 2")
        )  # fmt: skip
    split = ", ".join(f"{kind} {share:.0%}" for kind, share in ours.call("split").items())
    rows.append(Row("2", f"{name}: where our step's time goes", split, "", None, ""))
    for side in sides.values():
        side.close()
    return rows


def _rows(name: str, ours: Side, taken: dict[str, list[Taken]], peaks: Sequence[Sequence[float]]) -> list[Row]:
    operations = Operations(*ours.call("operations"))
    computed, flat, trained = ours.call("tokens")
    mm, onednn, *by_cpu = (max(values) for values in zip(*peaks, strict=True))
    rate = sum(operations) / median(taken["ours"])
    cpu_rate = sum(operations) / statistics.median(one.cpu_s for one in taken["ours"])
    parts = ", ".join(f"{part} {value:.0f}" for part, value in operations._asdict().items())
    theirs, times = ("", None) if "trl" not in taken else (seconds(taken["trl"]), ratio(taken["trl"], taken["ours"]))
    note = f"{computed} of {flat} tokens, {trained} trained; {flat / median(taken['ours']):.0f} tokens/s"
    return [
        Row("2", f"{name}: step", seconds(taken["ours"]), theirs, times, "", note),
        Row("2", f"{name}: share of the float32 peak", f"{rate:.0f} GFLOP/s", f"{max(mm, onednn):.0f} GFLOP/s",
            round(rate / max(mm, onednn), 2), TARGETS[name],
            f"by processor seconds {cpu_rate / max(by_cpu):.2f}; of torch.mm's {mm:.0f}: {rate / mm:.2f}; "
            f"GFLOP: {parts}"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--no-trl", action="store_true")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="art-training-") as scratch:
        for name in given.shape:
            base = build_base(SHAPES[name], Path(scratch))
            rows += measure(name, base, repeats=given.repeats, threads=given.threads, has_trl=not given.no_trl)
    print(table(rows))


if __name__ == "__main__":
    main()
