"""Loads or builds a base model, its tokenizer and its adapter: the one place where weights come from.

It neither samples (engines) nor trains (learners); both may hold the same `Weights`. torch, transformers and peft are
imported inside functions only, so that importing this module costs nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Weights:
    """A policy's weights in this process, shared by engine and learner.

    Whoever runs the model, forward or update, holds `lock`; whoever changes weights raises `version` inside it, and
    whoever caches what they computed (keys and values) drops it when `version` has moved.
    """

    model: Any  # PeftModel, or a transformers causal LM where lora is None; in eval mode unless a learner is inside
    tokenizer: Any  # transformers tokenizer with a chat template
    device: torch.device
    dtype: torch.dtype  # of the base; adapters are float32
    max_length: int  # tokens of prompt and reply together
    base: str  # hub id or directory it was loaded from
    has_adapter: bool
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @contextlib.contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The reference policy: the same model without its adapter."""
        assert self.has_adapter, "a model without an adapter has no reference"
        with self.model.disable_adapter():
            yield
