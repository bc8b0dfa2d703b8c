"""The base model in 4 bits, by bitsandbytes: the settings that load it, and one fix after loading.

NF4 with double quantization (Dettmers et al. 2023, arXiv:2305.14314): each linear layer but the head is kept in 4 bits
and computed in the model's dtype. There is no 8-bit form, for two reasons. It rounds activations as well, so that the
gradient would depend on the order of sums and therefore on the packing. And vLLM does not quantize to it while loading.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from art_cli.runtime.errors import UsageError


def require_bitsandbytes() -> None:
    """Raises UsageError: it is not installed."""
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        raise UsageError(
            "model.quantize: needs bitsandbytes, which is not installed: pip install 'art-cli[quantize]'"
        ) from None


def settings(dtype: Any) -> Any:
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
