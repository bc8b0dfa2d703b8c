"""LoRA adapters: adds fresh or saved adapters to a base model, and merges them into it."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_cli.config.schema import LoraConfig
from art_cli.models.adapter_config import check_patterns, read_lora
from art_cli.models.saved_weights import fitting, load_checkpoint
from art_cli.models.tokenizer import load_tokenizer
from art_cli.models.weights import Weights, copy_sharing
from art_cli.runtime.errors import UsageError, one_line


def with_adapter(base: Weights, lora: LoraConfig, seed: int) -> Weights:
    """Returns a policy with a fresh adapter on a bare base model, initialized as in `load_weights`; tensors are shared.

    Raises UsageError if the model lacks a module to adapt.
    """
    bare = on_base(base, None)
    return replace(bare, model=add_adapter(bare.model, lora, seed).eval(), has_adapter=True)


def on_base(base: Weights, adapter: Path | None) -> Weights:
    """Returns a policy with a saved adapter on a bare base model, or the base alone; the base's tensors are shared.

    adapter_config.json describes the adapter, and the adapter's tokenizer replaces the base's. Any number of policies
    may share a base independently. Raises CheckpointError if the adapter is missing or belongs to another model.
    """
    assert not base.has_adapter, "adapters are put on a bare base model"
    policy = copy_sharing(base, [*base.model.parameters(), *base.model.buffers()])
    if adapter is None:
        return policy
    policy.model, policy.has_adapter = _wrap(policy.model, adapter), True
    if (adapter / "tokenizer_config.json").is_file():
        with fitting(adapter / "tokenizer.json"):
            policy.tokenizer = load_tokenizer(str(adapter))
    load_checkpoint(policy, adapter)
    return policy


def merge(weights: Weights) -> Weights:
    """Returns the policy with the adapter merged, W + alpha / rank * B A. Do not use `weights` afterwards."""
    if not weights.has_adapter:
        return weights
    with weights.lock:
        return replace(weights, model=weights.model.merge_and_unload(safe_merge=True), has_adapter=False)


def add_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    """Returns the model with a fresh adapter. Raises UsageError if the model lacks a module to adapt."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), _deprecations_hidden():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"model.lora.targets: {one_line(error)}") from error


def _wrap(model: Any, adapter: Path) -> Any:
    """Returns the model with an adapter shaped like the saved adapter; its tensors are not loaded yet."""
    import peft
    import torch

    config = read_lora(adapter)
    with fitting(adapter / "adapter_config.json"), torch.random.fork_rng(devices=[]), _deprecations_hidden():
        check_patterns(config, (name for name, _ in model.named_modules()))
        config.base_model_name_or_path = None  # the base's path during training, which may no longer exist
        config.inference_mode = True
        # Tensors are set later. These settings would otherwise compute tensors, change the base or import code.
        config.init_lora_weights, config.loftq_config, config.eva_config, config.corda_config = True, {}, None, None
        config.megatron_config, config.auto_mapping = None, None
        return peft.get_peft_model(model, config).eval()


@contextlib.contextmanager
def _deprecations_hidden() -> Iterator[None]:
    """Hides a warning: peft 0.21 uses a name deprecated in transformers 5.23. Remove this once peft is fixed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield
