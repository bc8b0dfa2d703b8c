"""Whole models without gradients, on the model's own weights or a merged copy; known layers, and bounds on their gap.

    x -> norm -> q, k, v -> head norms -> rotary                            attention_inputs
    q, k, v -> attention (the caller's) -> out
    out -> o -> y = x + that -> norm -> gated MLP -> y + that               layer_outputs

For small models the cost of a step is dominated by Python and kernel calls: transformers' layers with PEFT make about
130 calls per layer, Decoder makes 40. Decoder knows the layers of Llama, Mistral, Qwen2 and Qwen3 in transformers, with
or without plain LoRA (arXiv:2106.09685) on their projections. `read_layer` reads the weights of all families into the
same structure, or raises Unknown with the reason.

The caller compares a Decoder with its model before use. Both compute the same sums in a different order, so they differ
by rounding, and a table by dtype bounds the difference for engine and learner. In some models (sharp attention, many
layers) a single rounding of the embeddings moves the numbers further; these get a wider bound. Measured on random
models with 2 to 28 layers in float32, float16 and bfloat16, faster layers differ from the model's own layers by 0.03 to
3 such movements.

MergedDecoder uses a merged copy of the weights, prepared for this CPU, with fewer and faster products. Adapters are
added into the copy (W + s B A), and so are norm weights. Projections with the same input become one product, and oneDNN
stores each matrix in its preferred layout. Sampling with 24M parameters takes two thirds of Decoder's time. The copy
doubles the memory for weights and is rebuilt when they change. It is float32 only, because lower precision would round
an adapter's change away in the sum.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from art_cli.models.decoder.maths import Norm, Projection, gate, has_onednn, rotate, signed
from art_cli.runtime.allocator import memory_size

ROUNDINGS = 8  # largest gap as a multiple of the model's own movement by rounding
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
PACKAGES = ("transformers", __name__.partition(".")[0])
BLOCK = 512  # rows computed together between two attentions, few enough for the CPU caches
SHARE = 1 / 8  # largest merged copy as a share of machine memory. The weights themselves need the same amount again

Blocks = list[Tensor]  # hidden states in blocks of BLOCK rows; the last block may be shorter


class Gap(NamedTuple):
    """The difference between two ways to compute a model. Example: Gap(2e-7, 1e-6)."""

    logprob: float  # nats
    gradient: float = 0.0  # norm of the difference, relative to the gradient's norm; 0 if not compared

    def is_within(self, bound: "Gap") -> bool:
        return self.logprob <= bound.logprob and self.gradient <= bound.gradient


# Gaps safely explained by rounding; the comments give the largest measured. A wrong mask gives at least 0.02 nats, and
# 0.3 of the gradient.
BOUNDS = {
    torch.float64: Gap(1e-4, 1e-3),
    torch.float32: Gap(1e-4, 1e-3),  # 2e-6 nats and 3e-6, with sharp attention 4e-3 nats and 2e-2
    torch.float16: Gap(1e-2, 0.05),  # 4e-3 nats and 8e-3
    torch.bfloat16: Gap(3e-2, 0.1),  # 3e-2 nats and 6e-2
}
LIMIT = Gap(0.1, 0.25)  # beyond this, rounding looks like another model


def bound_of(dtype: torch.dtype, gap: Gap, rounding: Callable[[], Gap]) -> Gap:
    """Returns the largest gap explained by rounding. `rounding` measures it, and is called beyond the table only."""
    bound = BOUNDS[dtype]
    if gap.is_within(bound):
        return bound
    moved = rounding()
    return Gap(*(max(low, min(ROUNDINGS * own, high)) for low, own, high in zip(bound, moved, LIMIT, strict=True)))


@contextlib.contextmanager
def rounded_otherwise(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Inside, every number in the model's embeddings is rounded up or down once more."""
    draw, epsilon = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def move(module: Any, inputs: Any, hidden: Tensor) -> Tensor:
        signs = 2 * torch.randint(0, 2, hidden.shape, generator=draw) - 1
        return hidden * (1 + epsilon * signs.to(hidden))

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def matrix_gap(found: Tensor, own: Tensor) -> Gap:
    """Returns the gap between two [L, V] logprob matrices: the worst row's mean, weighted by `found`."""
    return Gap((found.exp() * (found - own).abs()).sum(-1).max().item())


class Unknown(Exception):
    """A layer or setting is not implemented here. The message names it."""


class Layer(NamedTuple):
    """One decoder layer's weights, as views of the model's own tensors."""

    attention_norm: Norm
    query: Projection
    key: Projection
    value: Projection
    head_norms: tuple[Norm, Norm] | None  # norms of queries and keys, in families with head norms
    out: Projection
    mlp_norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    head_dim: int
    number: int  # layer index
    scaling: float
    window: int | None  # sliding window in tokens, including the token itself; None attends to everything before

    @property
    def projections(self) -> tuple[Projection, ...]:
        return (self.query, self.key, self.value, self.out, self.gate, self.up, self.down)

    def merging(self) -> "Layer":
        """Returns the same layer, multiplying by weights plus adapter."""
        return Layer._make(part.merging() if isinstance(part, Projection) else part for part in self)

    @property
    def input_tensors(self) -> tuple[Tensor | None, ...]:
        """Weights used before attention: the norm's, the head norms', and each projection's."""
        norms = self.head_norms or (None, None)
        weights = [None if norm is None else norm.weight for norm in (self.attention_norm, *norms)]
        return (*weights, *(tensor for projection in self.projections[:3] for tensor in projection.tensors))

    @property
    def output_tensors(self) -> tuple[Tensor | None, ...]:
        """Weights used after attention: the norm's and each projection's."""
        return (self.mlp_norm.weight, *(tensor for projection in self.projections[3:] for tensor in projection.tensors))


def check_model(model: Any) -> None:
    """Raises Unknown if the model's embedding, final norm and head may differ from the known families."""
    name = type(model).__name__
    if name not in {f"{family}ForCausalLM" for family in FAMILIES}:
        raise Unknown(f"class {name}")


def read_layer(layer: Any) -> Layer:
    """Returns the layer's current weights. Raises Unknown."""
    names = {f"{family}DecoderLayer" for family in FAMILIES}
    if not any(kind.__name__ in names for kind in type(layer).__mro__):  # sharding creates subclasses
        raise Unknown(f"layer {type(layer).__name__}")
    attention, mlp = layer.self_attn, layer.mlp
    for module in (layer, attention, mlp):
        _check_forward(module)
    if not is_silu(mlp.act_fn):
        raise Unknown(f"activation {type(mlp.act_fn).__name__}")
    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=read_norm(layer.input_layernorm),
        query=read_projection(attention.q_proj),
        key=read_projection(attention.k_proj),
        value=read_projection(attention.v_proj),
        head_norms=(read_norm(attention.q_norm), read_norm(attention.k_norm)) if has_head_norms else None,
        out=read_projection(attention.o_proj),
        mlp_norm=read_norm(layer.post_attention_layernorm),
        gate=read_projection(mlp.gate_proj),
        up=read_projection(mlp.up_proj),
        down=read_projection(mlp.down_proj),
        head_dim=attention.head_dim,
        number=attention.layer_idx,
        scaling=attention.scaling,
        window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
    )


def read_norm(module: Any) -> Norm:
    """Raises Unknown for other norms. Gemma's weights are offset by 1, but its epsilon has another attribute name."""
    if not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        raise Unknown(f"norm {type(module).__name__}")
    return Norm(module.weight, module.variance_epsilon)


def read_projection(module: Any) -> Projection:
    """Reads a plain linear layer, or plain LoRA by PEFT with one active adapter. Raises Unknown for anything else.

    Returns the linear layer alone if adapters are off or the active adapter does not cover it.
    """
    if type(module) is torch.nn.Linear:
        return Projection(module.weight, module.bias)
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear:
        raise Unknown(f"layer {type(module).__name__}")
    lora: Any = module
    base, names = lora.base_layer, [name for name in lora.active_adapters if name in lora.lora_A]
    is_plain = type(base) is torch.nn.Linear and not (lora.merged or lora.fan_in_fan_out or lora.lora_variant)
    has_dropout = any(type(lora.lora_dropout[name]) is not torch.nn.Identity for name in names)
    if not is_plain or has_dropout or len(names) > 1 or any(lora.lora_B[name].bias is not None for name in names):
        raise Unknown("an adapter that is not plain LoRA")
    if lora.disable_adapters or not names:
        return Projection(base.weight, base.bias)
    [name] = names
    return Projection(base.weight, base.bias, lora.lora_A[name].weight, lora.lora_B[name].weight, lora.scaling[name])


def is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _check_forward(module: Any) -> None:
    """Raises Unknown if code from elsewhere, such as Unsloth's, replaces the module's forward."""
    package, _, _ = (getattr(module.forward, "__module__", None) or "").partition(".")
    if package not in PACKAGES:
        raise Unknown(f"{type(module).__name__} with a forward of {package or 'no module'}")


class AttentionInputs(NamedTuple):
    """[T, heads, D] states for attention, and additional tensors for a backward pass."""

    query: Tensor
    key: Tensor
    value: Tensor
    before: tuple[Tensor, Tensor] | None  # queries and keys before their head norms, if any
    inners: tuple[Tensor | None, ...]  # A x of each projection


class LayerOutputs(NamedTuple):
    """[T, hidden] layer result, and additional tensors for a backward pass."""

    result: Tensor
    middle: Tensor  # x + o(out)
    gates: Tensor
    up: Tensor
    inners: tuple[Tensor | None, ...]


def attention_inputs(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> AttentionInputs:
    """Returns queries, keys and values for x [T, hidden]; cos and signed sin [T, 1, D]."""
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
    """Computes the rest of a layer after its attention gave `out` [T, heads * D] for x [T, hidden]."""
    middle, inner_out = layer.out.apply(out, base=x)
    normed = layer.mlp_norm.apply(middle)
    gates, inner_gate = layer.gate.apply(normed)
    up, inner_up = layer.up.apply(normed)
    del normed
    result, inner_down = layer.down.apply(gate(gates, up), base=middle)
    return LayerOutputs(result, middle, gates, up, (inner_out, inner_gate, inner_up, inner_down))


class TokenRow(Protocol):
    """T tokens in one forward pass, and their attention to each other and to the cache."""

    tokens_T: Tensor
    positions_T: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor: ...


class Decoder:
    """Views of a model's weights in order of use. The caller creates a new Decoder when the weights change."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, including adapters. Raises Unknown."""
        check_model(model)
        self._embed = embedding(model)
        self._rotary = model.model.rotary_emb
        self._layers = [_in_dtype(read_layer(layer), self._embed.dtype) for layer in model.model.layers]
        self._norm, self._head = read_norm(model.model.norm), read_projection(model.lm_head)

    def logits(self, tokens: TokenRow, rows: Tensor) -> Tensor:
        """Returns [len(rows), V]."""
        hidden = F.embedding(tokens.tokens_T, self._embed)  # [T, hidden]
        cos, sin = rotary(self._rotary, hidden, tokens)
        last = self._layers[-1]
        for layer in self._layers:
            query, key, value, *_ = attention_inputs(layer, hidden, cos, sin)
            out = attend(tokens, layer, query, key, value)
            if layer is last:  # only these rows of the result are used
                out, hidden = out[rows], hidden[rows]
            hidden = layer_outputs(layer, out, hidden).result
        return self._head.apply(self._norm.apply(hidden))[0]


def attend(tokens: TokenRow, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns [T, heads * D]."""
    return tokens.attend(layer.number, query, key, value, scaling=layer.scaling, window=layer.window).flatten(1)


def embedding(model: Any) -> Tensor:
    """Returns [V, hidden]. Raises Unknown if the embedding is more than a table."""
    module = model.model.embed_tokens
    if type(module) is not torch.nn.Embedding:
        raise Unknown(f"embedding {type(module).__name__}")
    weight: Tensor = module.weight.detach()
    return weight


def rotary(module: Any, hidden: Tensor, tokens: TokenRow) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines [T, 1, D] for the tokens' positions, using the model's own module."""
    cos, sin = (part[0][:, None] for part in module(hidden[None], tokens.positions_T[None]))
    return cos, signed(sin)


def _in_dtype(layer: Layer, dtype: torch.dtype) -> Layer:
    """Returns the layer with adapters in this dtype, so they are cast once instead of every step."""
    return Layer._make(part.in_dtype(dtype) if isinstance(part, Projection) else part for part in layer)


class MergedDecoder:
    """A merged copy of a model's weights in order of use."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers causal LM, including adapters. Raises Unknown."""
        check_model(model)
        _check_machine(model)
        self._embed = embedding(model)
        self._rotary = model.model.rotary_emb
        self._layers = [_MergedLayer(read_layer(layer)) for layer in model.model.layers]
        norm = read_norm(model.model.norm)
        self._epsilon = norm.epsilon
        self._head = _Product([read_projection(model.lm_head)], norm)

    def logits(self, tokens: TokenRow, rows: Tensor) -> Tensor:
        """Returns [len(rows), V]."""
        hidden = F.embedding(tokens.tokens_T, self._embed)  # [T, hidden]
        turns = list(zip(*(torch.split(part, BLOCK) for part in rotary(self._rotary, hidden, tokens)), strict=True))
        blocks = [_padded(block) for block in torch.split(hidden, BLOCK)]
        for layer in self._layers[:-1]:
            blocks = layer(blocks, tokens, turns)
        last = self._layers[-1](blocks, tokens, turns, rows)
        return self._head(_scaled(_whole(last), self._epsilon))[: len(rows)]


def _check_machine(model: Any) -> None:
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not has_onednn():
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
        """Returns blocks of hidden states with both residuals added. Rows past the T tokens are padding.

        With `rows`, only these rows are computed after attention and returned. The other rows still write their keys
        and values into the cache.
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
        """Computes the part of the layer after attention."""
        hidden = self._out.onto(hidden, "add", _padded(out))
        normed = _scaled(hidden, self._layer.mlp_norm.epsilon)
        return self._down.onto(hidden, "add", self._up.onto(self._gate(normed, "swish"), "mul", normed))


class _Product:
    """Several projections with the same input, computed as one product."""

    def __init__(self, projections: list[Projection], norm: Norm | None = None) -> None:
        """`norm`: its weight is folded into the product, so the caller only needs to scale the input."""
        parts = torch.cat([_merged(projection) for projection in projections])
        weight = parts if norm is None else parts * norm.weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, then: str = "none") -> Tensor:
        """Returns [T, out], after oneDNN's elementwise function `then`: "swish" is silu."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, then, [], "")
        return out

    def onto(self, other: Tensor, how: str, x: Tensor) -> Tensor:
        """Returns other + self(x) for `how` "add", other * self(x) for "mul"."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, how)
        return out


def _merged(projection: Projection) -> Tensor:
    """Returns W + s B A."""
    weight = projection.weight.detach()
    if projection.down is None or projection.up is None:
        return weight
    return torch.addmm(weight, projection.up.detach(), projection.down.detach(), alpha=projection.scaling)


def _whole(blocks: Blocks) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _padded(states: Tensor) -> Tensor:
    """Pads with rows of zeros up to one of four sizes per doubling: 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

    oneDNN generates and keeps code for every number of rows, 0.2 MB each, so only a few different sizes are used.
    """
    num = len(states)
    step = 2 ** max((num - 1).bit_length() - 3, 0)
    return F.pad(states, (0, 0, 0, -num % step))


def _scaled(x: Tensor, epsilon: float) -> Tensor:
    """Applies RMSNorm over the last dimension, without its weight."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(norm * norm / x.shape[-1] + epsilon)
