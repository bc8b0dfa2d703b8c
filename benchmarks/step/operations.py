"""Floating-point operations of a training step: what it needs at least, so that nothing computed twice counts twice.

For each linear layer of n weights (n_a in its adapter's A, n_b in B) over T tokens:

    2 T n + 2 T n          forward, and backward to the activations; no gradient of frozen weights
    4 T n_a + 4 T n_b      adapter, which is added into the weights first: A x, its gradient's way back, both gradients

and besides, E predicting positions of V H weights of the head, and per layer d = heads * head_dim:

    2 E V H + 2 E V H      head: forward and backward
    14 d P                 attention over P pairs of tokens: 2 matmuls forward, 5 backward

Nothing reads what the last layer gives for tokens that predict nothing, so its queries, attention, output and MLP are
over the predicting positions only. Nothing needs the gradient of the embeddings, so the first layer's queries, keys and
values have no backward product to the activations.
"""

from typing import Any, NamedTuple

import numpy as np

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.packs.packing import pack_samples
from art_cli.learners.step.step_samples import make_step_samples
from benchmarks.step.batches import Groups


class Operations(NamedTuple):
    """Of one step, in GFLOP."""

    base: float
    adapter: float
    head: float
    attention: float


class Tokens(NamedTuple):
    """How much a step computes. Example: Tokens(4000, 900, 350000.0, 90000.0)."""

    num: int
    num_predicting: int  # those of them that predict a trained token
    pairs: float  # number of pairs of a token and one that it sees, itself included
    pairs_predicting: float  # those of them whose first token predicts a trained one


def step_operations(model: Any, tokens: Tokens) -> Operations:
    """Of a PEFT model's step."""
    config = model.config
    base = adapter = 0.0
    for name, parameter in model.named_parameters():
        part = _part(name)
        if part is None:
            continue
        layer, module, is_adapter = part
        is_narrow = layer == config.num_hidden_layers - 1 and module not in ("k_proj", "v_proj")
        num = tokens.num_predicting if is_narrow else tokens.num
        if is_adapter:
            adapter += 4e-9 * num * parameter.numel()
        else:
            is_first = layer == 0 and module in ("q_proj", "k_proj", "v_proj")
            base += (2e-9 if is_first else 4e-9) * num * parameter.numel()
    width = config.num_attention_heads * config.head_dim
    pairs = (config.num_hidden_layers - 1) * tokens.pairs + tokens.pairs_predicting
    return Operations(
        base=base,
        adapter=adapter,
        head=4e-9 * tokens.num_predicting * config.vocab_size * config.hidden_size,
        attention=14e-9 * width * pairs,
    )


def _part(name: str) -> tuple[int, str, bool] | None:
    """(layer, module, whether it is the adapter's) of a parameter of a linear layer with an adapter; None: another."""
    words = name.split(".")
    is_adapter = any(word.startswith("lora_") for word in words)
    if not is_adapter and "base_layer" not in words:
        return None
    layer = int(words[words.index("layers") + 1])
    module = next(word for word in words if word.endswith("_proj"))
    return layer, module, is_adapter


def tokens_of(groups: Groups, algorithm: Algorithm, *, is_shared: bool = True) -> Tokens:
    """What a step on the groups computes: as one prefix tree of all samples, or with a row for each of them."""
    samples = [sample for group in make_step_samples(groups, algorithm).groups for sample in group]
    [whole] = pack_samples(samples, budget=sum(len(sample.token_ids) for sample in samples), share=is_shared)
    positions = np.unique(whole.edges.positions)
    seen = whole.depths + 1.0
    return Tokens(len(whole.token_ids), len(positions), float(seen.sum()), float(seen[positions].sum()))
