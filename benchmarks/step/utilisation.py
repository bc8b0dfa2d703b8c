"""How much of the machine the training step uses: its floating-point operations against matmul's best, in one run.

    python -m benchmarks.step.utilisation [--repeats 5]

Figure 7: models of 24M and 100M parameters with LoRA of rank 16, T = 2,048 tokens: 8 sequences of 256, all but the
first token of each trained. benchmarks/step/operations.py says which operations count.
Where the rest goes: one profiled step, by kind of operation.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

from benchmarks.shared.sides import Row, Side, median, seconds, table
from benchmarks.step.batches import make_learner, single_turn
from benchmarks.step.operations import Operations, step_operations, tokens_of

LENGTH, NUM = 256, 8
KINDS = {  # beginning of an operation's name -> kind
    "matmul": ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm", "aten::addmv"),
    "attention": ("aten::_scaled_dot_product",),
    "head's softmax": ("aten::exp", "aten::amax", "aten::sub_", "aten::scatter", "aten::logsumexp"),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::clone"),
}


def split_of(step: Callable[[], None]) -> dict[str, float]:
    """Shares of a profiled step's time by kind of operation, the largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    found: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        kind = next((kind for kind, starts in KINDS.items() if event.key.startswith(starts)), "elementwise, rest")
        found[kind] += event.self_cpu_time_total
    total = sum(found.values())
    return {kind: found[kind] / total for kind in sorted(found, key=lambda kind: -found[kind])}


class Step:
    """A training step of one model."""

    def __init__(self, size: str, dtype: str) -> None:
        import torch

        from benchmarks.shared.models import build

        self.weights = build(size, has_adapter=True, dtype=getattr(torch, dtype))
        self.learner = make_learner(self.weights, micro_batch_tokens=LENGTH * NUM)
        self.groups = single_turn(NUM, 1, prompt=1, completion=LENGTH - 1)

    def step(self) -> None:
        self.learner.step(self.groups)

    def operations(self) -> Operations:
        return step_operations(self.weights.model, tokens_of(self.groups, self.learner.algorithm))

    def split(self) -> dict[str, float]:
        return split_of(self.step)

    def peak(self, dtype: str) -> float:
        """GFLOP/s of the best of a few large matmuls."""
        import torch

        size = 2048
        left, right = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
        best = 0.0
        for _ in range(5):
            begin = time.perf_counter()
            left @ right
            best = max(best, 2e-9 * size**3 / (time.perf_counter() - begin))
        return best


def measure(*, repeats: int = 5) -> list[Row]:
    rows = []
    for size, dtype, target in (("24M", "float32", ">= 0.40"), ("100M", "float32", ">= 0.40"), ("24M", "bfloat16", "")):
        side = Side(Step, size, dtype)
        side.call("step")
        peaks, taken = [], []
        for _ in range(repeats):  # measured in turn, so that peak and steps come from the same minutes
            peaks.append(side.call("peak", dtype))
            taken.append(side.take())
        operations, split = Operations(*side.call("operations")), side.call("split")
        side.close()
        rate = sum(operations) / median(taken)
        parts = ", ".join(f"{name} {value:.0f}" for name, value in operations._asdict().items())
        rest = ", ".join(f"{kind} {share:.0%}" for kind, share in split.items())
        rows.append(
            Row("7", f"{size}, {dtype}: share of the matmul peak", f"{rate:.0f} GFLOP/s; {seconds(taken)}",
                f"{max(peaks):.0f} GFLOP/s", round(rate / max(peaks), 2), target, f"GFLOP: {parts}; time: {rest}")
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    print(table(measure(repeats=parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
