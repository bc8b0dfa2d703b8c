"""Weights: a policy's model, tokenizer and device in this process, shared by engine and learner."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from art_cli.models.tokenizer import stop_ids

if TYPE_CHECKING:
    import torch


@dataclass
class Weights:
    """A policy's weights in this process, shared by engine and learner.

    Code that runs the model, forward or update, holds `lock`. Code that changes weights increments `version` while
    holding the lock. Caches of keys and values are only valid for the version they were computed with.
    """

    model: Any  # PeftModel, or a transformers causal LM if lora is None; in eval mode except during learning
    tokenizer: Any  # transformers tokenizer with a chat template
    device: torch.device
    dtype: torch.dtype  # dtype of the base weights; adapters are float32
    max_length: int  # context length for prompt and reply together
    base: str  # hub id or directory of the base model
    has_adapter: bool
    quantize: str | None = None  # "4bit" if the base was quantized at load time
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def dtype_name(self) -> str:
        """The dtype's name in a configuration. Example: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def inner_model(self) -> Any:
        """The transformers model, whose layers include the adapter."""
        return self.model.get_base_model() if self.has_adapter else self.model

    @property
    def vocabulary(self) -> int:
        """The number of token ids, also for multimodal models."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def stop_ids(self) -> list[int]:
        return stop_ids(self.tokenizer, getattr(self.model, "generation_config", None), self.model.config)

    @contextlib.contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Inside, the adapter is disabled, and the model acts as the reference policy."""
        assert self.has_adapter, "a model without an adapter has no reference"
        with self.model.disable_adapter():
            yield


class Size(NamedTuple):
    """Parameter counts. Example: Size(whole=24_300_000, trained=290_000)"""

    whole: int
    trained: int

    def __str__(self) -> str:
        """Example: "134.5M parameters, an adapter with 4.88M"."""
        base, own = ((self.whole - self.trained) / 1e6, self.trained / 1e6)
        return f"{base:.1f}M parameters, an adapter with {own:.2f}M" if base else f"{own:.1f}M parameters, all trained"


def count_parameters(model: Any) -> Size:
    """Counts the model's parameters. Weights kept in 4 bits count with their unpacked shape."""
    parameters = list(model.parameters())
    shapes = [getattr(getattr(p, "quant_state", None), "shape", p.shape) for p in parameters]
    sizes = [math.prod(shape) for shape in shapes]
    return Size(sum(sizes), sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad))


def token_logprobs(weights: Weights, token_ids: Sequence[int]) -> list[float]:
    """Returns [L - 1] logprobs in nats for all tokens but the initial one; transformers' forward, float32 softmax."""
    import torch

    ids = torch.tensor(list(token_ids), device=weights.device)
    with weights.lock, torch.no_grad():
        logits = weights.model(ids[None], use_cache=False).logits[0, :-1].float()
        found: list[float] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
    return found


def clone_trainable(weights: Weights) -> Weights:
    """Returns the same policy with a copy of its trainable weights; frozen weights are shared."""
    frozen = [parameter for parameter in weights.model.parameters() if not parameter.requires_grad]
    with weights.lock:
        return copy_sharing(weights, [*frozen, *weights.model.buffers()])


def copy_sharing(weights: Weights, tensors: Sequence[torch.Tensor]) -> Weights:
    """Returns a copy of the policy that shares these tensors with the original."""
    model = copy.deepcopy(weights.model, {id(tensor): tensor for tensor in tensors})
    return replace(weights, model=model, version=0, lock=threading.RLock())
