"""LoRA adapters: puts fresh and saved ones on a base model, and merges them into it."""

import contextlib
import copy
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_cli.config.schema import LoraConfig
from art_cli.models.saved_weights import fitting, load_checkpoint
from art_cli.models.tokenizer import load_tokenizer
from art_cli.models.weights import Weights
from art_cli.runtime.errors import UsageError, one_line


def with_adapter(base: Weights, lora: LoraConfig, seed: int) -> Weights:
    """A policy made of a bare base model and a fresh adapter, drawn as `load_weights` does; the tensors are shared.

    Raises UsageError: a module to adapt that the model does not have.
    """
    bare = on_base(base, None)
    return replace(bare, model=add_adapter(bare.model, lora, seed).eval(), has_adapter=True)


def on_base(base: Weights, adapter: Path | None) -> Weights:
    """Returns a policy of a bare base model and a saved adapter, or of the base alone; the base's tensors are shared.

    adapter_config.json describes the adapter, and the adapter's tokenizer replaces the base's. Any number of
    policies may share one base without seeing each other. Raises CheckpointError: no LoRA adapter, or another model's.
    """
    assert not base.has_adapter, "adapters are put on a bare base model"
    memo = {id(tensor): tensor for tensor in [*base.model.parameters(), *base.model.buffers()]}
    model = copy.deepcopy(base.model, memo)
    if adapter is None:
        return replace(base, model=model, version=0, lock=threading.RLock())
    model = _wrap(model, adapter)
    tokenizer = base.tokenizer
    if (adapter / "tokenizer_config.json").is_file():
        with fitting(adapter / "tokenizer.json"):
            tokenizer = load_tokenizer(str(adapter))
    weights = replace(base, model=model, tokenizer=tokenizer, has_adapter=True, version=0, lock=threading.RLock())
    load_checkpoint(weights, adapter)
    return weights


def merge(weights: Weights) -> Weights:
    """Returns the same policy without an adapter: W + alpha / rank * B A replaces W.

    `weights` cannot be used afterwards.
    """
    if not weights.has_adapter:
        return weights
    with weights.lock:
        return replace(weights, model=weights.model.merge_and_unload(safe_merge=True), has_adapter=False)


def add_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    """Returns the model with a fresh adapter. Raises UsageError: a module to adapt that it does not have."""
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
    """Returns the model with an adapter of the saved one's shape, whose tensors are not loaded yet."""
    import peft
    import torch

    with fitting(adapter / "adapter_config.json"), torch.random.fork_rng(devices=[]), _deprecations_hidden():
        config: Any = peft.PeftConfig.from_pretrained(str(adapter))
        config.base_model_name_or_path = None  # the path of the base in training, which may be gone
        config.inference_mode = True
        # The tensors are set afterwards. These settings would compute others first, change the base, or import code.
        config.init_lora_weights, config.loftq_config, config.eva_config, config.corda_config = True, {}, None, None
        config.megatron_config, config.auto_mapping = None, None
        return peft.get_peft_model(model, config).eval()


@contextlib.contextmanager
def _deprecations_hidden() -> Iterator[None]:
    """Hides a warning: peft 0.21 uses a name that transformers 5.23 deprecates. Remove this when it does not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield
