"""Chooses the dtype of a base model where `model.dtype` is auto: by what the device has, so that load cannot matter.

bfloat16 halves the memory, and a device that multiplies it natively (a GPU's tensor cores, AMX on a CPU) computes
products six times faster and more. Elsewhere it does not pay: AVX-512 alone gives 2.1 times on products and 1.1 to 1.4
times on a step, and bfloat16 rounds logprobs to a hundredth of a nat. Nothing is timed, because a busy machine times
differently from a quiet one. torch is imported inside functions only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SMALL = 8_000_000  # number of parameters; on a CPU, smaller models wait for other things than products


class DtypeChoice(NamedTuple):
    """Example: DtypeChoice("float32", "this CPU has no AMX")."""

    name: str  # "float32" or "bfloat16"
    reason: str


def choose_dtype(base: str, device: str) -> DtypeChoice:
    """Returns the dtype for the model at `base` (a hub id or directory) on the device ("cpu", "cuda:0").

    Raises OSError, ValueError: transformers knows no model there.
    """
    if not device.startswith("cpu"):
        if has_bfloat16_gpu():
            return DtypeChoice("bfloat16", "the GPU has bfloat16")
        return DtypeChoice("float32", "the GPU has no bfloat16")
    if not has_amx():
        return DtypeChoice("float32", "this CPU has no AMX")
    if _count_parameters(base) < SMALL:
        return DtypeChoice("float32", f"the CPU has AMX, which pays from {SMALL / 1e6:.0f}M parameters on")
    return DtypeChoice("bfloat16", "this CPU has AMX")


def has_bfloat16_gpu() -> bool:
    """Returns True if torch sees a GPU that multiplies bfloat16 itself; an emulation does not count."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def has_amx() -> bool:
    """Returns True if the CPU has AMX and the system lets this process use it."""
    import torch

    return bool(torch.cpu._init_amx())


def _count_parameters(base: str) -> int:
    """Returns the number of the model's parameters without reading its weights."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped there
    with torch.device("meta"):
        num: int = auto.from_config(
            transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        ).num_parameters()
    return num
