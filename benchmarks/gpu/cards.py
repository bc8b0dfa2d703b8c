"""The peak of a card in dense bfloat16, from its name; of an unknown one, or a CPU, as large matmuls measure it."""

import time
from typing import Any

from benchmarks.gpu.order import Order

# TFLOP/s with float32 sums and without sparsity, from NVIDIA's data sheets; the longest name that fits counts.
PEAKS = {
    "A10": 125.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "B100": 1750.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "GH200": 989.4,
    "H100": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H20": 148.0,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "H800": 989.4,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
}


def known_peak(name: str) -> float | None:
    """TFLOP/s of the card that torch calls `name`; None: it is not in the table."""
    words = name.replace("-", " ").split()
    fitting = [card for card in PEAKS if _has(words, card.split())]
    return PEAKS[max(fitting, key=len)] if fitting else None


def _has(words: list[str], wanted: list[str]) -> bool:
    """Whether the words stand there in a row. Example: "H100 PCIe" in "NVIDIA H100 PCIe"."""
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def peak(order: Order) -> float:
    """TFLOP/s that a share of the peak is taken of."""
    known = known_peak(order.card) if order.dtype == "bfloat16" else None
    return known or measured_peak(order.dtype, is_small=order.is_small)


def measured_peak(dtype: str, *, is_small: bool) -> float:
    """TFLOP/s of the best of ten large matmuls."""
    import torch

    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    size = 512 if is_small else 8192
    left, right = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    best = 0.0
    for _ in range(10):
        synchronize()
        begin = time.perf_counter()
        left @ right
        synchronize()
        best = max(best, 2e-12 * size**3 / (time.perf_counter() - begin))
    return best


def synchronize() -> None:
    """Returns when the GPU has done what it was given; at once where there is none."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
