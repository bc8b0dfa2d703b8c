"""The layer around its attention, and a whole model without gradients on the model's own weights.

    x -> norm -> q, k, v -> norms of the heads -> rotary                    attention_inputs
    q, k, v -> attention (the caller's) -> out
    out -> o -> y = x + that -> norm -> gated MLP -> y + that               layer_outputs

With small models a step costs what its Python and kernel calls cost: transformers' layers with PEFT's around them make
about 130 a layer, this makes 40. The caller compares a Decoder with its model before it uses it (compare.py).
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from art_cli.models.decoder.known import Layer, Unknown, check_model, read_layer, read_norm, read_projection
from art_cli.models.decoder.maths import Projection, gate, rotate, signed


class AttentionInputs(NamedTuple):
    """[T, heads, D] states for the attention, and what a backward pass needs beside x."""

    query: Tensor
    key: Tensor
    value: Tensor
    before: tuple[Tensor, Tensor] | None  # queries and keys before the norms of the heads, or None without such norms
    inners: tuple[Tensor | None, ...]  # A x of each projection


class LayerOutputs(NamedTuple):
    """[T, hidden] the layer's result, and what a backward pass needs beside `out`."""

    result: Tensor
    middle: Tensor  # x + o(out)
    gates: Tensor
    up: Tensor
    inners: tuple[Tensor | None, ...]


def attention_inputs(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> AttentionInputs:
    """Queries, keys and values of x [T, hidden]; cos and signed sin [T, 1, D]."""
    normed = layer.attention_norm.apply(x)
    applied = [projection.apply(normed) for projection in (layer.query, layer.key, layer.value)]
    query, key, value = (out.view(len(x), -1, layer.head_dim) for out, _ in applied)
    before = None
    if layer.head_norms is not None:
        before = query, key
        query, key = (norm.apply(states) for norm, states in zip(layer.head_norms, before, strict=True))
    inners = tuple(inner for _, inner in applied)
    return AttentionInputs(rotate(query, cos, sin), rotate(key, cos, sin), value, before, inners)


def layer_outputs(layer: Layer, out: Tensor, x: Tensor) -> LayerOutputs:
    """Returns the end of a layer whose attention gave `out` [T, heads * D] for x [T, hidden]."""
    middle, inner_out = layer.out.apply(out, base=x)
    normed = layer.mlp_norm.apply(middle)
    gates, inner_gate = layer.gate.apply(normed)
    up, inner_up = layer.up.apply(normed)
    del normed
    result, inner_down = layer.down.apply(gate(gates, up), base=middle)
    return LayerOutputs(result, middle, gates, up, (inner_out, inner_gate, inner_up, inner_down))


class TokenRow(Protocol):
    """The T tokens of one forward pass, and how they attend to each other and to what is cached."""

    tokens_T: Tensor
    positions_T: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor: ...


class Decoder:
    """Views of a model's weights in the order they are used. The caller makes a new one when the weights change."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, adapters put in. Raises Unknown."""
        check_model(model)
        self._embed = embedding(model)
        self._rotary = model.model.rotary_emb
        self._layers = [_in_dtype(read_layer(layer), self._embed.dtype) for layer in model.model.layers]
        self._norm, self._head = read_norm(model.model.norm), read_projection(model.lm_head)

    def logits(self, tokens: TokenRow, rows: Tensor) -> Tensor:
        """Returns [len(rows), V]"""
        hidden = F.embedding(tokens.tokens_T, self._embed)  # [T, hidden]
        cos, sin = rotary(self._rotary, hidden, tokens)
        last = self._layers[-1]
        for layer in self._layers:
            query, key, value, *_ = attention_inputs(layer, hidden, cos, sin)
            out = attend(tokens, layer, query, key, value)
            if layer is last:  # only `rows` of its result are read
                out, hidden = out[rows], hidden[rows]
            hidden = layer_outputs(layer, out, hidden).result
        return self._head.apply(self._norm.apply(hidden))[0]


def attend(tokens: TokenRow, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns [T, heads * D]"""
    return tokens.attend(layer.number, query, key, value, scaling=layer.scaling, window=layer.window).flatten(1)


def embedding(model: Any) -> Tensor:
    """Returns [V, hidden]. Raises Unknown: an embedding that is more than a table."""
    module = model.model.embed_tokens
    if type(module) is not torch.nn.Embedding:
        raise Unknown(f"embedding {type(module).__name__}")
    weight: Tensor = module.weight.detach()
    return weight


def rotary(module: Any, hidden: Tensor, tokens: TokenRow) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, 1, D] of the tokens' positions, by the model's own module."""
    cos, sin = (part[0][:, None] for part in module(hidden[None], tokens.positions_T[None]))
    return cos, signed(sin)


def _in_dtype(layer: Layer, dtype: torch.dtype) -> Layer:
    """Returns the layer with adapters in that dtype, so that they are cast once instead of at each step."""
    return Layer._make(part.in_dtype(dtype) if isinstance(part, Projection) else part for part in layer)
