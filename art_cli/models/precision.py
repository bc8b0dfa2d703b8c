"""The dtype or bit width for loading a base model.

With `model.dtype` auto, the dtype depends on the device's features, so its load does not matter. Nothing is timed,
because timings differ between busy and quiet machines. bfloat16 halves the memory, and devices with native bfloat16
products (GPU tensor cores, AMX on CPUs) compute them at least six times faster. Elsewhere it does not pay: AVX-512
alone speeds up products 2.1 times on an EPYC and a step 1.1 to 1.4 times, but a Xeon's products only reach 0.6 times
the speed. bfloat16 also rounds logprobs to 0.01 nats.

In 4 bits (bitsandbytes' NF4 with double quantization, Dettmers et al. 2023, arXiv:2305.14314) all linear layers except
the head stay quantized and are computed in the model's dtype; `keep_layout` fixes a problem after loading. There is no
8-bit mode, for two reasons. It also rounds activations, so the gradient would depend on summation order and therefore
on packing. And vLLM does not quantize to 8 bits at load time.

torch and transformers are imported inside functions only, so importing this module is cheap.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

from art_cli.models.run_memory import model_size
from art_cli.runtime.errors import UsageError

# Number of parameters. In bfloat16, engine and learner differ by 0.03 nats per token for SmolLM2-135M. It learned less
# (0.75, 0.81, 0.97 against 0.88, 0.97, 0.97) for 1/7 less time per run. In float32, the weights of models below this
# size fit into 2 GB on a GPU, and activations are twice as large as in bfloat16.
SMALL = 500_000_000


class DtypeChoice(NamedTuple):
    """Example: DtypeChoice("float32", "this CPU has no AMX")."""

    name: str  # "float32" or "bfloat16"
    reason: str


def choose_dtype(base: str, device: str, *, may_be_exact: bool = False) -> DtypeChoice:
    """Returns the dtype for the model at `base` (a hub id or directory) on a device ("cpu", "cuda:0").

    `may_be_exact`: small models on a GPU may use float32, because the engine supports it. vLLM's GPU kernels for LoRA
    only support 16 bits (lora/ops/triton_ops/lora_shrink_op.py). Raises OSError or ValueError for unknown models.
    """
    is_gpu = not device.startswith("cpu")
    if not (has_bfloat16_gpu() if is_gpu else has_amx()):
        return DtypeChoice("float32", "the GPU has no bfloat16" if is_gpu else "this CPU has no AMX")
    if (may_be_exact or not is_gpu) and model_size(base).parameters < SMALL:
        return DtypeChoice("float32", f"bfloat16 pays from {SMALL / 1e6:.0f}M parameters on")
    return DtypeChoice("bfloat16", "the GPU has bfloat16" if is_gpu else "this CPU has AMX")


def has_bfloat16_gpu() -> bool:
    """Returns True if torch sees a GPU with native bfloat16 products; emulation does not count."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def has_amx() -> bool:
    """Returns True if the CPU has AMX and the system lets this process use it."""
    import torch

    return bool(torch.cpu._init_amx())


def gpu_name() -> str:
    """Returns CUDA's name for GPU 0, or "" if torch sees no GPU. Example: "NVIDIA H100 80GB HBM3"."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def gpu_bytes(device: str) -> float:
    """Returns a GPU's memory in bytes ("cuda:1"; "auto" and "cuda" mean GPU 0), or 0 if torch sees no GPU."""
    import torch

    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(int(index or 0)).total_memory)


def require_bitsandbytes() -> None:
    """Raises UsageError if bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise UsageError("model.quantize: needs bitsandbytes, which is not installed: pip install 'art-cli[quantize]'")


def quantization_settings(dtype: Any) -> Any:
    """Returns `quantization_config` for transformers' `from_pretrained`; `dtype` is torch's dtype for computation."""
    import transformers

    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(model: Any) -> bool:
    """Returns True if the model was quantized at load time or saved quantized, so it cannot change its device."""
    return bool(getattr(model, "is_quantized", False))


def keep_layout(model: Any) -> None:
    """Makes layers keep their weights in the layout in which they were loaded.

    On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks weights in place during a forward pass without gradients, and
    its backward pass reads the repacked weights as if they were the originals. Gradients after any sampling or scoring
    would be wrong. Remove this when the backward pass supports the repacked layout.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
