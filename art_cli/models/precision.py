"""The dtype, or the few bits, in which a base model is loaded.

Where `model.dtype` is auto, the dtype follows from what the device has, so that load cannot matter. Nothing is timed,
because a busy machine times differently from a quiet one. bfloat16 halves the memory, and a device that multiplies it
natively (a GPU's tensor cores, AMX on a CPU) computes products six times faster and more. Elsewhere it does not pay:
AVX-512 alone gives 2.1 times on products of an EPYC, 1.1 to 1.4 times on a step, and only 0.6 times on products of a
Xeon; and bfloat16 rounds logprobs to a hundredth of a nat.

In 4 bits (bitsandbytes' NF4 with double quantization, Dettmers et al. 2023, arXiv:2305.14314) each linear layer but the
head is kept quantized and computed in the model's dtype; one fix follows the loading. There is no 8-bit form, for two
reasons. It rounds activations as well, so that the gradient would depend on the order of sums and therefore on the
packing. And vLLM does not quantize to it while loading.

torch and transformers are imported inside functions only, so that importing this module costs nothing.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from art_cli.models.run_memory import model_size
from art_cli.runtime.errors import UsageError

# Number of parameters. In bfloat16, engine and learner differ by 0.03 nats a token of SmolLM2-135M, which then learnt
# less (0.75, 0.81, 0.97 against 0.88, 0.97, 0.97), for a run that took a seventh less time. On a GPU float32 takes at
# most 2 GB for the weights of so small a model, and its activations are twice as large.
SMALL = 500_000_000


class DtypeChoice(NamedTuple):
    """Example: DtypeChoice("float32", "this CPU has no AMX")."""

    name: str  # "float32" or "bfloat16"
    reason: str


def choose_dtype(base: str, device: str, *, may_be_exact: bool = False) -> DtypeChoice:
    """Returns the dtype for the model at `base` (a hub id or directory) on the device ("cpu", "cuda:0").

    `may_be_exact`: on a GPU a small model may have float32, because the engine samples in it. vLLM's LoRA kernels there
    take 16 bits only (lora/ops/triton_ops/lora_shrink_op.py). Raises OSError, ValueError: transformers knows no model.
    """
    is_gpu = not device.startswith("cpu")
    if not (has_bfloat16_gpu() if is_gpu else has_amx()):
        return DtypeChoice("float32", "the GPU has no bfloat16" if is_gpu else "this CPU has no AMX")
    if (may_be_exact or not is_gpu) and model_size(base).parameters < SMALL:
        return DtypeChoice("float32", f"bfloat16 pays from {SMALL / 1e6:.0f}M parameters on")
    return DtypeChoice("bfloat16", "the GPU has bfloat16" if is_gpu else "this CPU has AMX")


def has_bfloat16_gpu() -> bool:
    """Returns True if torch sees a GPU that multiplies bfloat16 itself; an emulation does not count."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def has_amx() -> bool:
    """Returns True if the CPU has AMX and the system lets this process use it."""
    import torch

    return bool(torch.cpu._init_amx())


def gpu_name() -> str:
    """Returns the name that CUDA gives to the first GPU, or "" if torch sees none. Example: "NVIDIA H100 80GB HBM3"."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def gpu_bytes(device: str) -> float:
    """Returns the memory of a GPU in bytes ("cuda:1"; "auto" and "cuda" are the first), or 0 if torch sees none."""
    import torch

    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(int(index or 0)).total_memory)


def require_bitsandbytes() -> None:
    """Raises UsageError: it is not installed."""
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        raise UsageError(
            "model.quantize: needs bitsandbytes, which is not installed: pip install 'art-cli[quantize]'"
        ) from None


def quantization_settings(dtype: Any) -> Any:
    """The `quantization_config` of transformers' `from_pretrained`; `dtype` is torch's, that of the computation."""
    import transformers

    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(model: Any) -> bool:
    """Returns True if the model was loaded in few bits, by us or because it was saved so.

    It cannot change its device then.
    """
    return bool(getattr(model, "is_quantized", False))


def keep_layout(model: Any) -> None:
    """Makes the layers keep their weights in the layout in which they were loaded.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a layer's weight in place at the first pass without gradients,
    and its backward pass reads the repacked weight as if it were the original. All gradients after a first sample or
    score would be wrong. Remove this when the backward pass knows the repacked layout.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
