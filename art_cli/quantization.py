"""The base model in 4 bits, by bitsandbytes: how it is asked for, and what has to be mended after loading it.

NF4 with double quantization (Dettmers et al. 2023, arXiv:2305.14314): each linear layer but the head is kept in 4 bits
and computed in the model's dtype. There is no 8-bit form: it rounds activations as well, so that the order of sums,
and with it the packing, would show in the gradient; and vLLM does not quantise to it while it loads.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from art_cli.errors import UsageError


def require_bitsandbytes() -> None:
    """Raises UsageError: it is not installed."""
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        raise UsageError(
            "model.quantize: needs bitsandbytes, which is not installed: pip install 'art-cli[quantize]'"
        ) from None


def settings(dtype: Any) -> Any:
    """What transformers' `from_pretrained` takes as `quantization_config`; `dtype`: torch's, of the computation."""
    import transformers

    return transformers.BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(model: Any) -> bool:
    """Whether it was loaded in few bits, by us or because it was saved so; it then stays on its device."""
    return bool(getattr(model, "is_quantized", False))


def keep_layout(model: Any) -> None:
    """Has the layers leave their weights as they were loaded.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a layer's weight in place at its first pass without gradients
    and takes the repacked one for the original in the backward pass: all gradients after a first sample or score
    would be wrong. To be removed when its backward pass knows the repacked layout.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
