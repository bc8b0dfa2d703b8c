"""The forward pass of common decoders on a copy of the weights, made for this CPU: fewer products, each one faster.

The copy is what makes it fast: adapters are added into the weights (W + scaling B A), norms' weights too, the layers
that read the same states become one product, and oneDNN lays matrices out in the order in which it reads them. It costs
the memory of the weights once more and is made anew when they change. float32 only: below it an adapter's change would
be rounded away in the sum. Other devices and dtypes are fused.py's, which also says what layers both know.
"""

from typing import Any

import torch
import torch.nn.functional as F

from art_cli.engines.embedded.attention import Layout
from art_cli.engines.embedded.fused import Unknown, adapted, check_known, plain_weight

Tensor = torch.Tensor
Blocks = list[Tensor]  # of rows; all but the last have BLOCK

BLOCK = 512  # rows computed together between attentions: what is made of them stays in the caches


class PackedDecoder:
    """A model's weights in the order they are used, as they were when this was made."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, adapters put in. Raises Unknown."""
        check_known(model)
        weight = next(model.parameters())
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        has_products = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch's own use: it may go without a word
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not (has_onednn and has_products):
            raise Unknown("not float32 on a CPU with oneDNN")
        self._embed = plain_weight(model.model.embed_tokens, torch.nn.Embedding)
        self._rotary = model.model.rotary_emb
        window = getattr(model.config, "sliding_window", None)  # where the layers do not say
        self._layers = [_Layer(layer, window) for layer in model.model.layers]
        self._epsilon = model.model.norm.variance_epsilon
        self._head = _Product([model.lm_head], norm=model.model.norm)

    def logits(self, layout: Layout, rows: Tensor) -> Tensor:
        """[len(rows), V]"""
        hidden = F.embedding(layout.tokens_T, self._embed)  # [T, hidden]
        cos, sin = (part[0][:, None] for part in self._rotary(hidden[None], layout.positions_T[None]))
        half = sin.shape[2] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        rotary = list(zip(torch.split(cos, BLOCK), torch.split(sin, BLOCK), strict=True))
        blocks = [_padded(block) for block in torch.split(hidden, BLOCK)]
        for layer in self._layers[:-1]:
            blocks = layer(blocks, layout, rotary)
        last = self._layers[-1](blocks, layout, rotary, rows)
        return self._head(_scaled(_whole(last), self._epsilon))[: len(rows)]


class _Layer:
    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._epsilon, self._mlp_epsilon = (
            norm.variance_epsilon for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self._inputs = _Product(inputs, norm=layer.input_layernorm)
        self._out, self._down = _Product([attention.o_proj]), _Product([mlp.down_proj])
        self._gate = _Product([mlp.gate_proj], norm=layer.post_attention_layernorm)
        self._up = _Product([mlp.up_proj], norm=layer.post_attention_layernorm)
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self._index, self._window = attention.layer_idx, getattr(attention, "sliding_window", window)
        self._heads, heads_kv, _ = (linear.out_features // self._head_dim for linear in inputs)
        self._heads_rotated = self._heads + heads_kv  # queries and keys
        self._head_norm: tuple[Tensor, float] | None = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight.expand(self._heads, -1), attention.k_norm.weight.expand(heads_kv, -1)]
            self._head_norm = torch.cat(norms).detach(), attention.q_norm.variance_epsilon

    def __call__(
        self, blocks: Blocks, layout: Layout, rotary: list[tuple[Tensor, Tensor]], rows: Tensor | None = None
    ) -> Blocks:
        """Blocks of hidden states with both residuals added. Rows past the layout's T are padding.

        `rows`: those that are read of what this gives, and then all that it gives; the others only leave their keys and
        values.
        """
        parts = [self._states(block, cos, sin) for block, (cos, sin) in zip(blocks, rotary, strict=True)]
        rotated, value = (_whole(list(part)) for part in zip(*parts, strict=True))
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        out = layout.attend(self._index, query, key, value, scaling=self._scaling, window=self._window)
        out = out.reshape(len(out), -1)
        if rows is not None:
            out, blocks = out[rows], [_padded(block) for block in torch.split(_whole(blocks)[rows], BLOCK)]
        outs = torch.split(out, BLOCK)
        return [self._after(part, block) for part, block in zip(outs, blocks, strict=True)]

    def _states(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, heads + heads_kv, head_dim] queries and keys, rotated; [rows, heads_kv, head_dim] values."""
        states = self._inputs(_scaled(hidden, self._epsilon))[: len(cos)].view(len(cos), -1, self._head_dim)
        rotated, value = states[:, : self._heads_rotated], states[:, self._heads_rotated :]
        if self._head_norm is not None:
            weight, epsilon = self._head_norm
            rotated = _scaled(rotated, epsilon).mul_(weight)
        return torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin), value

    def _after(self, out: Tensor, hidden: Tensor) -> Tensor:
        """What follows the attention's output."""
        hidden = self._out.plus(_padded(out), hidden)
        normed = _scaled(hidden, self._mlp_epsilon)
        return self._down.plus(self._up.times(normed, self._gate.silu(normed)), hidden)


class _Product:
    """Linear layers with the same input as one product, outputs side by side."""

    def __init__(self, modules: list[Any], norm: Any = None) -> None:
        """`norm`: whose weight the input is still to be multiplied by."""
        parts, biases = zip(*map(_merged, modules), strict=True)
        weight = torch.cat(parts) if norm is None else torch.cat(parts) * norm.weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = None if biases[0] is None else torch.cat(biases)

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


def _merged(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear layer, its active adapters added: LoRA (arXiv:2106.09685), W + scaling B A."""
    base = module if type(module) is torch.nn.Linear else adapted(module)
    weight = plain_weight(base, torch.nn.Linear)
    if base is not module:
        weight = weight.clone()
        for name in module.active_adapters:
            if name in module.lora_A:
                up, down = module.lora_B[name].weight.detach(), module.lora_A[name].weight.detach()
                weight.addmm_(up, down, alpha=module.scaling[name])
    return weight, None if base.bias is None else base.bias.detach()


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
