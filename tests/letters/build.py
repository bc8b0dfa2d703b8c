"""Writes the tiny random model of tests/support/models/tiny.py as a transformers directory."""

from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from tests.support.models.tiny import tiny_config, tiny_tokenizer


def build(directory: Path) -> None:
    _write(directory, head_dim=16)


def build_wide(directory: Path) -> None:
    """With heads of 32, the smallest that vLLM's kernels for the CPU know."""
    _write(directory, head_dim=32)


def _write(directory: Path, head_dim: int) -> None:
    config = tiny_config()
    config.head_dim = head_dim
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
