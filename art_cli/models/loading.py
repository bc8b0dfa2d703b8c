"""Loads a base model with its tokenizer and a fresh adapter, in a chosen dtype or in 4 bits.

torch, transformers and peft are imported inside functions only, so importing this module is cheap.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.config.schema import ModelConfig
from art_cli.models import precision
from art_cli.models.adapters import add_adapter
from art_cli.models.base_source import hide_progress_bars, loading, require_base
from art_cli.models.device import grow_segments, pick_device
from art_cli.models.model_shape import length_of
from art_cli.models.tokenizer import templated_tokenizer
from art_cli.models.weights import Weights
from art_cli.runs.manifest import is_built
from art_cli.runtime.allocator import keep_freed_memory

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Loads a model with a fresh adapter: (config, base, device, dtype, seed) -> PeftModel or causal LM
ModelLoader = Callable[["ModelConfig", str, "torch.device", "torch.dtype", int], Any]


def load_weights(
    config: ModelConfig,
    base: str,
    *,
    device: str = "auto",
    seed: int = 0,
    load: ModelLoader | None = None,
    named: str | None = None,
) -> Weights:
    """Returns model and tokenizer at `base` (a hub id or directory), with a fresh adapter if configured.

    The adapter initially changes nothing (B = 0); A is drawn from `seed`. `load` replaces transformers and PEFT.
    `named` is the base's name in errors when no configuration names it, such as "--base 'x'".
    Raises UsageError if loading fails, the chat template is missing, or the model lacks a module to adapt.
    """
    import_libraries(has_transformers=load is None, has_adapter=config.lora is not None)
    import torch

    target = torch.device(pick_device(device))
    if target.type == "cpu":
        keep_freed_memory()
    else:
        grow_segments(target)
    name = resolve_dtype(config, base, device=device, named=named).name
    num_bytes = sum(path.stat().st_size for path in Path(base).glob("*.safetensors"))  # 0 for a model on the hub
    size = f" ({num_bytes / 1e9:.1f} GB)" if num_bytes >= 5e7 else ""
    log.info("loading %s%s", config.title if is_built(Path(base)) else base, size)
    with loading(base, named):
        dtype = getattr(torch, name)
        model = (load or _load_model)(config, base, target, dtype, seed)  # Unsloth must be imported before transformers
    tokenizer = templated_tokenizer(config, base, named=named)
    max_length = length_of(config, model.config)
    model.eval()
    has_adapter = config.lora is not None
    return Weights(model, tokenizer, target, dtype, max_length, base, has_adapter, quantize=config.quantize)


def resolve_dtype(
    config: ModelConfig, base: str, *, device: str = "auto", named: str | None = None, may_be_exact: bool = False
) -> precision.DtypeChoice:
    """Returns the configured dtype, or `choose_dtype` for the device. Raises UsageError like `load_weights`."""
    require_base(base, named)
    if config.dtype != "auto":
        return precision.DtypeChoice(config.dtype, "")
    with loading(base, named):
        return precision.choose_dtype(base, pick_device(device), may_be_exact=may_be_exact)


def _load_model(config: ModelConfig, base: str, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Returns the model from transformers, with an adapter from PEFT."""
    import transformers

    hide_progress_bars()
    few_bits: dict[str, Any] = {}
    if config.quantize is not None:
        precision.require_bitsandbytes()
        few_bits = {"quantization_config": precision.quantization_settings(dtype), "device_map": {"": device}}
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **few_bits
    )
    model, found = made
    _check_complete(found)
    precision.keep_layout(model)
    if config.lora is not None:
        model = add_adapter(model, config.lora, seed)
    return model if precision.is_quantized(model) else model.to(device)


def import_libraries(*, has_adapter: bool, has_transformers: bool = True) -> None:
    """Imports the model libraries, and excludes their 460,000 objects from garbage collection.

    A full collection stops every thread, including event loops. It takes 0.35 s with these objects and 0.02 s without.
    """
    if has_transformers:
        if not {"torch", "transformers"} <= sys.modules.keys():
            log.info("importing torch and transformers")
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401
    if has_transformers and has_adapter:
        import peft  # noqa: F401
    if gc.get_freeze_count() == 0:  # only once, because later objects may need collection
        gc.freeze()


def _check_complete(found: dict[str, Any]) -> None:
    """Raises ValueError if tensors are missing. transformers would initialize them randomly with just a warning.

    `found` is transformers' loading report. Extra tensors are fine, for example a head for another task.
    """
    if missing := sorted(found.get("missing_keys") or ()):
        raise ValueError(
            f"config.json and the weights do not fit: {len(missing)} tensors are missing, first {missing[0]}"
        )
    if unused := sorted(found.get("unexpected_keys") or ()):
        log.warning("the base model's files hold %d tensors that it does not use, first %s", len(unused), unused[0])
