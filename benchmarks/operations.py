"""Floating-point operations of a training step: what it needs at least, so that nothing computed twice counts twice.

N the weights of the linear layers of the frozen base, N_lora the adapter's, per layer d = heads * head_dim, V H the
head:

    2 T N + 2 T N          base: forward, and backward to the activations; no gradient of frozen weights
    6 T N_lora             adapter: forward, backward to activations and to weights
    2 E V H + 2 E V H      head, E trained positions: forward and backward
    14 d P layers          attention over P pairs of tokens: 2 matmuls forward, 5 backward
"""

from typing import Any, NamedTuple


class Operations(NamedTuple):
    """Of one step, in GFLOP."""

    base: float
    adapter: float
    head: float
    attention: float


def step_operations(model: Any, *, tokens: int, edges: int, pairs: float) -> Operations:
    """Of a PEFT model's step over `tokens`; `edges` predict a trained one. `pairs`: a token and one that it sees."""
    config = model.config
    named = dict(model.named_parameters())
    adapter = sum(p.numel() for name, p in named.items() if "lora_" in name)
    base = sum(p.numel() for name, p in named.items() if "base_layer.weight" in name)
    width = config.num_attention_heads * config.head_dim
    return Operations(
        base=4e-9 * tokens * base,
        adapter=6e-9 * tokens * adapter,
        head=4e-9 * edges * config.vocab_size * config.hidden_size,
        attention=14e-9 * width * pairs * config.num_hidden_layers,
    )
