"""Writes the tiny random model of tests/tiny.py as a transformers directory."""

import sys
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny import tiny_config, tiny_tokenizer


def build(directory: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(tiny_config()).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
