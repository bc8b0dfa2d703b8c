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

    Code that runs the model, forward or update, holds `lock`. Code that changes weights increments `version` while it
    holds the lock. A cache of keys and values is dropped once `version` differs from the one it was computed with.
    """

    model: Any  # PeftModel, or a transformers causal LM where lora is None; in eval mode unless a learner is inside
    tokenizer: Any  # transformers tokenizer with a chat template
    device: torch.device
    dtype: torch.dtype  # dtype of the base weights; adapters are float32
    max_length: int  # tokens of prompt and reply together
    base: str  # hub id or directory it was loaded from
    has_adapter: bool
    quantize: str | None = None  # "4bit" if the base was quantized as it was loaded, or None
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def dtype_name(self) -> str:
        """The dtype's name in a configuration. Example: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """The number of token ids, also of a model that reads more than text."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def stop_ids(self) -> list[int]:
        return stop_ids(self.tokenizer, getattr(self.model, "generation_config", None), self.model.config)

    @contextlib.contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Inside, the model is the reference policy: the same model without its adapter."""
        assert self.has_adapter, "a model without an adapter has no reference"
        with self.model.disable_adapter():
            yield


class Size(NamedTuple):
    """The number of a model's parameters. Example: Size(whole=24_300_000, trained=290_000)"""

    whole: int
    trained: int


def count_parameters(model: Any) -> Size:
    """Returns the model's size. A weight kept in 4 bits counts with its unpacked shape."""
    parameters = list(model.parameters())
    shapes = [getattr(getattr(p, "quant_state", None), "shape", p.shape) for p in parameters]
    sizes = [math.prod(shape) for shape in shapes]
    return Size(sum(sizes), sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad))


def token_logprobs(weights: Weights, token_ids: Sequence[int]) -> list[float]:
    """[L - 1] logprobs in nats of each token after the first, by transformers' own forward; float32 log-softmax."""
    import torch

    ids = torch.tensor(list(token_ids), device=weights.device)
    with weights.lock, torch.no_grad():
        logits = weights.model(ids[None], use_cache=False).logits[0, :-1].float()
        found: list[float] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
    return found


def clone_trainable(weights: Weights) -> Weights:
    """Returns the same policy with a copy of the trainable weights; both share the frozen ones."""
    frozen = [parameter for parameter in weights.model.parameters() if not parameter.requires_grad]
    memo = {id(tensor): tensor for tensor in [*frozen, *weights.model.buffers()]}
    with weights.lock:
        model = copy.deepcopy(weights.model, memo)
    return replace(weights, model=model, version=0, lock=threading.RLock())
