"""A whole model without gradients on a merged copy of its weights, made for this CPU: fewer products, each one faster.

Adapters are added into the copied weights (W + s B A), and norms' weights too. The projections that read the same
states become one product, and oneDNN lays each matrix out in the order in which it reads it. Sampling with 24M
parameters takes two thirds of the time that forward.py takes. The copy costs the memory of the weights once more and is
made again when they change. It is float32 only, because below it an adapter's change would be rounded away in the sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from art_cli.models.decoder.forward import TokenRow, attend, embedding, rotary
from art_cli.models.decoder.known import Layer, Unknown, check_model, read_layer, read_norm, read_projection
from art_cli.models.decoder.maths import Norm, Projection, rotate
from art_cli.runtime.allocator import memory_size

Blocks = list[Tensor]  # hidden states in blocks of BLOCK rows; the last block may have fewer

BLOCK = 512  # rows computed together between two attentions, few enough that their states stay in the caches
SHARE = 1 / 8  # of the memory of the machine: the largest copy. The weights themselves take as much once more


class MergedDecoder:
    """A model's weights in the order they are used, as they were when this was made."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, adapters put in. Raises Unknown."""
        check_model(model)
        _check_machine(model)
        self._embed = embedding(model)
        self._rotary = model.model.rotary_emb
        self._layers = [_MergedLayer(read_layer(layer)) for layer in model.model.layers]
        norm = read_norm(model.model.norm)
        self._epsilon = norm.epsilon
        self._head = _Product([read_projection(model.lm_head)], norm)

    def logits(self, tokens: TokenRow, rows: Tensor) -> Tensor:
        """Returns [len(rows), V]"""
        hidden = F.embedding(tokens.tokens_T, self._embed)  # [T, hidden]
        turns = list(zip(*(torch.split(part, BLOCK) for part in rotary(self._rotary, hidden, tokens)), strict=True))
        blocks = [_padded(block) for block in torch.split(hidden, BLOCK)]
        for layer in self._layers[:-1]:
            blocks = layer(blocks, tokens, turns)
        last = self._layers[-1](blocks, tokens, turns, rows)
        return self._head(_scaled(_whole(last), self._epsilon))[: len(rows)]


def _check_machine(model: Any) -> None:
    weight = next(model.parameters())
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_products = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not public: a torch version may lack it
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not (has_onednn and has_products):
        raise Unknown("not float32 on a CPU with oneDNN")
    num_bytes, limit = sum(parameter.nbytes for parameter in model.parameters()), SHARE * memory_size()
    if num_bytes > limit:
        raise Unknown(
            f"{num_bytes / 1e9:.2f} GB of weights to copy, above {limit / 1e9:.2f} GB, an eighth of the memory"
        )


class _MergedLayer:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._inputs = _Product([layer.query, layer.key, layer.value], layer.attention_norm)
        self._out, self._down = _Product([layer.out]), _Product([layer.down])
        self._gate, self._up = _Product([layer.gate], layer.mlp_norm), _Product([layer.up], layer.mlp_norm)
        self._heads, heads_kv = (len(one.weight) // layer.head_dim for one in (layer.query, layer.key))
        self._heads_rotated = self._heads + heads_kv  # queries and keys
        if layer.head_norms is not None:
            of_query, of_key = (norm.weight.detach() for norm in layer.head_norms)
            self._head_weight = torch.cat([of_query.expand(self._heads, -1), of_key.expand(heads_kv, -1)])

    def __call__(
        self, blocks: Blocks, tokens: TokenRow, turns: list[tuple[Tensor, ...]], rows: Tensor | None = None
    ) -> Blocks:
        """Blocks of hidden states with both residuals added. Rows past the T tokens are padding.

        `rows`: the only rows whose result is read, and the only ones of the result. The others leave their keys and
        values in the cache.
        """
        parts = [self._states(block, cos, sin) for block, (cos, sin) in zip(blocks, turns, strict=True)]
        rotated, value = (_whole(list(part)) for part in zip(*parts, strict=True))
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        out = attend(tokens, self._layer, query, key, value)
        if rows is not None:
            out, blocks = out[rows], [_padded(block) for block in torch.split(_whole(blocks)[rows], BLOCK)]
        return [self._after(part, block) for part, block in zip(torch.split(out, BLOCK), blocks, strict=True)]

    def _states(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [rows, heads + heads_kv, head_dim] queries and keys, rotated; [rows, heads_kv, head_dim] values."""
        layer = self._layer
        states = self._inputs(_scaled(hidden, layer.attention_norm.epsilon))[: len(cos)]
        states = states.view(len(cos), -1, layer.head_dim)
        rotated, value = states[:, : self._heads_rotated], states[:, self._heads_rotated :]
        if layer.head_norms is not None:
            rotated = _scaled(rotated, layer.head_norms[0].epsilon).mul_(self._head_weight)
        return rotate(rotated, cos, sin), value

    def _after(self, out: Tensor, hidden: Tensor) -> Tensor:
        """Computes the part of a layer that follows the attention's output."""
        hidden = self._out.plus(_padded(out), hidden)
        normed = _scaled(hidden, self._layer.mlp_norm.epsilon)
        return self._down.plus(self._up.times(normed, self._gate.silu(normed)), hidden)


class _Product:
    """Projections with the same input as one product, their outputs side by side."""

    def __init__(self, projections: list[Projection], norm: Norm | None = None) -> None:
        """`norm`: its weight is multiplied into the product, so that the caller only scales the input."""
        parts = torch.cat([_merged(projection) for projection in projections])
        weight = parts if norm is None else parts * norm.weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        return self._run(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """other + self(x)"""
        return self._run_with(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """other * self(x)"""
        return self._run_with(x, other, "mul")

    def _run(self, x: Tensor, then: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, then, [], "")
        return out

    def _run_with(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, then)
        return out


def _merged(projection: Projection) -> Tensor:
    """W + s B A"""
    weight = projection.weight.detach()
    if projection.down is None or projection.up is None:
        return weight
    return torch.addmm(weight, projection.up.detach(), projection.down.detach(), alpha=projection.scaling)


def _whole(blocks: Blocks) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _padded(states: Tensor) -> Tensor:
    """Rows of zeros below, up to the next of four numbers per doubling: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

    oneDNN writes code for each number of rows that it meets and keeps it, 0.2 MB each; so there are only a few of them.
    """
    num = len(states)
    step = 2 ** max((num - 1).bit_length() - 3, 0)
    return F.pad(states, (0, 0, 0, -num % step))


def _scaled(x: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last dimension without its weight."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(norm * norm / x.shape[-1] + epsilon)
