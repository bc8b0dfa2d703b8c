"""Chooses the dtype of a base model whose configuration leaves it open: by measuring, not by the processor's name.

bfloat16 halves the memory, and where a machine multiplies it natively (a GPU's tensor cores, AMX on a CPU) products
are many times faster; elsewhere they are slower. It also rounds logprobs to a hundredth of a nat, so it has to be worth
that. torch is imported inside functions only.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from art_cli import threads

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Times faster. A step gains about half of what its products gain: 1.1 to 1.4 times with the 2.1 of AVX-512 alone, which
# is not worth the rounding; AMX and tensor cores give 6 and more.
WORTH = 3.0
SMALL = 8_000_000  # parameters: on a CPU, models below wait for other things than products
SIDE, GPU_SIDE, REPEATS = 1024, 4096, 5  # of the square matrices that are multiplied: some milliseconds in float32


def choose_dtype(base: str, device: torch.device) -> torch.dtype:
    """bfloat16 where its products are `WORTH` it on the device, for the model at `base` (a hub id or directory)."""
    import torch

    gain = gain_of_bfloat16(device.type)
    if gain < WORTH or (device.type == "cpu" and _count_parameters(base) < SMALL):
        return torch.float32
    log.info("model.dtype bfloat16 (auto: its products are %.1f times faster here)", gain)
    return torch.bfloat16


@functools.cache
def gain_of_bfloat16(device: str) -> float:
    """How many times faster its products are than float32's, best of `REPEATS` in turn; measured once per process."""
    import torch

    side = SIDE if device == "cpu" else GPU_SIDE
    matrices = [torch.ones(side, side, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)]
    taken = [[_seconds(matrix) for matrix in matrices] for _ in range(REPEATS + 1)][1:]  # the first chooses a kernel
    del matrices
    if device == "cuda":
        torch.cuda.empty_cache()  # torch keeps what was freed
    threads.let_pool_go()
    single, half = (min(times) for times in zip(*taken, strict=True))
    gain: float = single / half
    return gain


def _seconds(matrix: torch.Tensor) -> float:
    """Of one product with itself, its end awaited."""
    import torch

    begin = time.perf_counter()
    torch.nn.functional.linear(matrix, matrix)[0, 0].item()
    return time.perf_counter() - begin


def _count_parameters(base: str) -> int:
    """Of a model that is not loaded. Raises OSError, ValueError: nothing there that transformers knows."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped there
    with torch.device("meta"):
        num: int = auto.from_config(
            transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        ).num_parameters()
    return num
