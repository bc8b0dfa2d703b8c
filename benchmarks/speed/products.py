"""What fewer bits would give where a reply is sampled: all products of SmolLM2-135M's layers, by kind of number.

    python -m benchmarks.speed.products                      # a minute on two quiet cores
    python -m benchmarks.speed.products --rows 1 64 --threads 1

Milliseconds for the 151 products of one token of each of N sequences; the columns are float32 by MKL (torch's
`linear`), by oneDNN with its weights laid out (the embedded engine's), float16 and bfloat16 by oneDNN, and weights in
8 bits with inputs in 16 (two rows of 8). Weights are random, all of them distinct, so that they come from memory.

Measured on a Xeon with AVX-512, VNNI and bf16 instructions and without AMX, two cores, quiet; medians of five:

| sequences | MKL | oneDNN | float16 | bfloat16 | 8 bits |
|---|---|---|---|---|---|
| 1 | 19 | 26 | 22 | 17 | 19 |
| 4 | 34 | 30 | 25 | 19 | 22 |
| 16 | 47 | 42 | 36 | 40 | 36 |
| 64 | 93 | 89 | 83 | 120 | 83 |

From 16 sequences on, where training samples, nothing is a fifth faster than the engine's float32: without AMX, 16-bit
products run at float32's rate or below. Eight bits for weights and inputs are four times as fast, and move the logprobs
of SmolLM2-135M by 0.20 nats on average (KL 0.05); with inputs in 16 bits it is 0.05 nats (KL 0.005), and there the gain
is gone too. So the engine samples in the policy's own dtype.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

SHAPES = ((576, 960, 30), (576, 576, 30), (576, 1536, 60), (1536, 576, 30), (576, 49152, 1))  # inputs, outputs, number


def reordered(dtype: torch.dtype) -> Callable[[Tensor], Any]:
    return lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)


def onednn(x: Tensor, weight: Tensor) -> Any:
    return torch.ops.mkldnn._linear_pointwise.default(x.to(weight.dtype), weight, None, "none", [], "").float()


def eight_bits(weight: Tensor) -> Any:
    scales = torch.linalg.vector_norm(weight, torch.inf, dim=-1) / 127
    rounded = (weight / scales[:, None]).round_().to(torch.int8)
    return torch.ops.onednn.qlinear_prepack(rounded, None), scales, torch.zeros(len(weight), dtype=torch.int32)


def onednn_eight_bits(x: Tensor, packed: Any) -> Tensor:
    """x / scale = 256 (high - 128) + (low - 128), both bytes unsigned, as oneDNN takes them."""
    scale = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True) / (127 * 256)
    whole = (x / scale).add_(128 * 257 + 0.5).to(torch.int32)
    rows = whole.view(torch.uint8).view(*x.shape, 4)[..., :2].permute(2, 0, 1).reshape(-1, x.shape[-1])
    given = (rows, 1.0, 128, *packed, None, 1.0, 0, torch.float32, "none", [], "")
    low, high = torch.ops.onednn.qlinear_pointwise(*given).view(2, len(x), -1)
    result: Tensor = low.add_(high, alpha=256).mul_(scale)
    return result


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Any]]] = {
    "MKL": (lambda weight: weight, F.linear),
    "oneDNN": (reordered(torch.float32), onednn),
    "float16": (reordered(torch.float16), onednn),
    "bfloat16": (reordered(torch.bfloat16), onednn),
    "8 bits": (eight_bits, onednn_eight_bits),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights = [[torch.randn(outputs, inputs) for _ in range(number)] for inputs, outputs, number in SHAPES]
    made = {name: [[make(one) for one in same] for same in weights] for name, (make, _) in KINDS.items()}
    print("| sequences | " + " | ".join(KINDS) + " |\n" + "|---" * (len(KINDS) + 1) + "|")
    for rows in options.rows:
        given = [torch.randn(rows, inputs) for inputs, _, _ in SHAPES]
        taken: dict[str, list[float]] = {name: [] for name in KINDS}
        for _ in range(options.repeats + 1):  # the sides in turn; the first chooses kernels
            for name, (_, multiply) in KINDS.items():
                begin = time.perf_counter()
                for x, same in zip(given, made[name], strict=True):
                    for weight in same:
                        multiply(x, weight)
                taken[name].append(1000 * (time.perf_counter() - begin))
        medians = (statistics.median(times[1:]) for times in taken.values())
        print(f"| {rows} | " + " | ".join(f"{median:.0f}" for median in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
