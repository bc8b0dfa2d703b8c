"""A decoder layer of common models as two functions around its attention, which keep little for the backward pass.

    x -> norm -> q, k, v -> norms of the heads -> rotary                    _Inputs
    q, k, v -> attention over the pack's tree -> out                        tree_attention.py
    out -> o -> y = x + that -> norm -> gated MLP -> y + that               _Outputs

Autograd on the model's own layers keeps, for each token, every input of every product and norm. These keep x, y, the
heads before their norms, gate and up; the rest is elementwise work done again in the backward pass. They know the
layers that Llama, Mistral, Qwen2 and Qwen3 share, with the base frozen and LoRA (arXiv:2106.09685) on any of the seven
projections; other layers run as they are (fused_layers.py). Whoever uses it compares it with the model first.

The last layer is computed, past its attention, for the tokens that predict something only: nothing reads the others.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from art_cli.learners.fused_layers import is_frozen_norm, plain_lora, rms_norm, rms_norm_backward
from art_cli.learners.tree_attention import Tree, attend

KNOWN = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
Saved = Sequence[Tensor | None]


@contextlib.contextmanager
def decoder_layers(model: Any) -> Iterator[None]:
    """While inside, the layers of the model that are known here are computed by it, where they are given a tree."""
    layers = getattr(model.base_model, "layers", [])
    changed = [layer for layer in layers if _is_known(layer)]
    try:
        for layer in changed:
            layer.forward = _forward_of(layer, is_last=layer is layers[-1])
        yield
    finally:
        for layer in changed:
            del layer.forward


def _is_known(layer: Any) -> bool:
    if not any(kind.__name__ in KNOWN for kind in type(layer).__mro__):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if not all(_is_own(module) for module in (layer, attention, mlp)):
        return False
    linear = [getattr(attention, name) for name in ATTENTION] + [getattr(mlp, name) for name in MLP]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(attention)]
    return (
        all(_projection(module) is not None for module in linear)
        and all(is_frozen_norm(norm) for norm in norms)
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _is_own(module: Any) -> bool:
    """Whether it computes as transformers, or this package, has it: not what Unsloth, say, has put in its place."""
    place: str = getattr(module.forward, "__module__", None) or ""
    return place.partition(".")[0] in ("transformers", __name__.partition(".")[0])


def _head_norms(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


def _forward_of(layer: Any, *, is_last: bool) -> Callable[..., Tensor]:
    own: Callable[..., Tensor] = layer.forward

    def forward(hidden: Tensor, **given: Any) -> Tensor:
        tree, (cos, sin) = given.get("tree"), given["position_embeddings"]
        if tree is None or cos.shape[-1] != layer.self_attn.head_dim:  # rotary of a part of each head
            return own(hidden, **given)
        run = partial(_run, layer, cos=cos[0], sin=sin[0], tree=tree, rows=tree.rows if is_last else None)
        if layer.gradient_checkpointing and layer.training:
            kept: Tensor = layer._gradient_checkpointing_func(run, hidden)
            return kept
        return run(hidden)

    return forward


def _run(layer: Any, hidden: Tensor, *, cos: Tensor, sin: Tensor, tree: Tree, rows: Tensor | None) -> Tensor:
    """[1, T, hidden], or of `rows` only."""
    # weights are looked up at every call: sharding puts whole tensors in place of the shards only while a layer runs
    attention, mlp, x = layer.self_attn, layer.mlp, hidden[0]
    norm = layer.input_layernorm
    epsilon = norm.variance_epsilon
    head_norms = [norm.weight for norm in _head_norms(attention)] or [None, None]
    linear = _Linears.of(attention, ATTENTION[:3])
    query, key, value = _Inputs.apply(  # type: ignore[no-untyped-call]
        x,
        cos,
        sin,
        epsilon,
        attention.head_dim,
        norm.weight,
        *head_norms,
        linear.scalings,
        *linear.tensors,
    )
    query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(
        attention,
        query,
        key,
        value,
        None,
        tree=tree,
        scaling=attention.scaling,
        sliding_window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
    )
    linear = _Linears.of(attention, ATTENTION[3:]) + _Linears.of(mlp, MLP)
    weight = layer.post_attention_layernorm.weight
    result: Tensor = _Outputs.apply(  # type: ignore[no-untyped-call]
        out[0].flatten(1), x, rows, epsilon, weight, linear.scalings, *linear.tensors
    )
    return result[None]


# --- a frozen linear layer and its adapter ----------------------------------------------------------------------------


class _Projection(NamedTuple):
    """W x + bias + s B A x; without an adapter W x + bias."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None  # A
    up: Tensor | None  # B
    scaling: float

    def apply(self, x: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[T, out], on top of `base` where given, and [T, rank] A x."""
        start = self.bias if base is None else base
        out = x @ self.weight.t() if start is None else torch.addmm(start, x, self.weight.t())
        if base is not None and self.bias is not None:
            out.add_(self.bias)
        if self.down is None or self.up is None:
            return out, None
        inner = x @ self.down.to(x.dtype).t()
        return out.addmm_(inner, self.up.to(x.dtype).t(), alpha=self.scaling), inner

    def grad_adapter(self, grad: Tensor, x: Tensor, inner: Tensor | None) -> "_AdapterGrads":
        if self.down is None or self.up is None or inner is None:
            return _AdapterGrads(None, None, None)
        grad_inner = (grad @ self.up.to(grad.dtype)).mul_(self.scaling)
        grad_up = (grad.t() @ inner).mul_(self.scaling)
        return _AdapterGrads(grad_inner, (grad_inner.t() @ x).to(self.down.dtype), grad_up.to(self.up.dtype))

    def grad_input(self, grad: Tensor, inner: Tensor | None, into: Tensor | None = None) -> Tensor:
        """[T, in], added to `into` where given; `inner`: the gradient of A x."""
        total = grad @ self.weight if into is None else into.addmm_(grad, self.weight)
        if inner is not None and self.down is not None:
            total.addmm_(inner, self.down.to(grad.dtype))
        return total


class _AdapterGrads(NamedTuple):
    inner: Tensor | None
    down: Tensor | None
    up: Tensor | None

    @property
    def of_tensors(self) -> Saved:
        """In the order of a projection's tensors."""
        return None, None, self.down, self.up


def _projection(module: Any) -> _Projection | None:
    """None: a linear layer that is trained, quantised or adapted in a way that is not known here."""
    if type(module) is torch.nn.Linear:
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        return None if is_trained else _Projection(module.weight, module.bias, None, None, 0.0)
    lora = plain_lora(module)
    if lora is None:
        return None
    base = module.base_layer
    if module.disable_adapters:
        return _Projection(base.weight, base.bias, None, None, 0.0)
    return _Projection(base.weight, base.bias, *lora)


class _Linears(NamedTuple):
    """Projections as an autograd function takes them: their tensors in one row, four each."""

    tensors: tuple[Tensor | None, ...]
    scalings: tuple[float, ...]

    @classmethod
    def of(cls, owner: Any, names: Sequence[str]) -> "_Linears":
        found = [_projection(getattr(owner, name)) for name in names]
        known = [projection for projection in found if projection is not None]
        assert len(known) == len(names), f"{names}: adapters have changed while the layers were in use"
        return cls(tuple(tensor for one in known for tensor in one[:4]), tuple(one.scaling for one in known))

    def __add__(self, other: tuple[Any, ...]) -> "_Linears":
        tensors, scalings = other
        return _Linears((*self.tensors, *tensors), (*self.scalings, *scalings))

    def projections(self) -> list[_Projection]:
        fours = zip(*(self.tensors[index::4] for index in range(4)), self.scalings, strict=True)
        return [_Projection(*four) for four in fours]


# --- the two functions ------------------------------------------------------------------------------------------------


class _Inputs(torch.autograd.Function):
    """Query, key and value [T, heads, D] of x [T, hidden]; cos and sin [T, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        epsilon: float,
        head_dim: int,
        weight: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        scalings: tuple[float, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        normed = rms_norm(x, weight, epsilon)
        applied = [projection.apply(normed) for projection in _Linears(tensors, scalings).projections()]
        query, key, value = (out.view(len(x), -1, head_dim) for out, _ in applied)
        is_normed = query_weight is not None
        before = (query, key) if is_normed else (None, None)
        ctx.save_for_backward(
            x, cos, sin, weight, query_weight, key_weight, *before, *(a for _, a in applied), *tensors
        )
        ctx.epsilon, ctx.scalings = epsilon, scalings
        if query_weight is not None and key_weight is not None:
            query, key = rms_norm(query, query_weight, epsilon), rms_norm(key, key_weight, epsilon)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: with checkpointing that computes them again
        x, cos, sin, weight, query_weight, key_weight, query, key, *inners = saved[:11]
        linear = _Linears(saved[11:], ctx.scalings).projections()
        grad_query, grad_key = (_rotated_back(grad, cos, sin) for grad in grads[:2])
        if query_weight is not None:
            grad_query = rms_norm_backward(grad_query, query, query_weight, ctx.epsilon)
            grad_key = rms_norm_backward(grad_key, key, key_weight, ctx.epsilon)
        outer = [grad.flatten(1) for grad in (grad_query, grad_key, grads[2])]
        normed = rms_norm(x, weight, ctx.epsilon)
        adapters = [one.grad_adapter(grad, normed, a) for one, grad, a in zip(linear, outer, inners, strict=True)]
        del normed
        grad_x = None
        if ctx.needs_input_grad[0]:
            total = None
            for one, grad, adapter in zip(linear, outer, adapters, strict=True):
                total = one.grad_input(grad, adapter.inner, into=total)
            assert total is not None
            grad_x = rms_norm_backward(total, x, weight, ctx.epsilon)
        return grad_x, *[None] * 8, *(grad for adapter in adapters for grad in adapter.of_tensors)


class _Outputs(torch.autograd.Function):
    """[T, hidden] of a layer whose attention gave `out` [T, heads * D] for x [T, hidden]; with `rows` of those only."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        x: Tensor,
        rows: Tensor | None,
        epsilon: float,
        weight: Tensor,
        scalings: tuple[float, ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.num_tokens = len(x)
        if rows is not None:
            out, x = out[rows], x[rows]
        to_out, to_gate, to_up, to_down = _Linears(tensors, scalings).projections()
        middle, inner_out = to_out.apply(out, base=x)
        normed = rms_norm(middle, weight, epsilon)
        gate, inner_gate = to_gate.apply(normed)
        up, inner_up = to_up.apply(normed)
        del normed
        result, inner_down = to_down.apply(F.silu(gate).mul_(up), base=middle)
        inners = inner_out, inner_gate, inner_up, inner_down
        ctx.save_for_backward(out, rows, middle, weight, gate, up, *inners, *tensors)
        ctx.epsilon, ctx.scalings = epsilon, scalings
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once, as above
        out, rows, middle, weight, gate, up, *inners = saved[:10]
        to_out, to_gate, to_up, to_down = _Linears(saved[10:], ctx.scalings).projections()
        inner_out, inner_gate, inner_up, inner_down = inners
        active = F.silu(gate)
        of_down = to_down.grad_adapter(grad, active * up, inner_down)
        grad_hidden = to_down.grad_input(grad, of_down.inner)
        grad_up = active.mul_(grad_hidden)
        grad_gate: Tensor = torch.ops.aten.silu_backward(grad_hidden.mul_(up), gate)
        del active, grad_hidden
        normed = rms_norm(middle, weight, ctx.epsilon)
        of_gate = to_gate.grad_adapter(grad_gate, normed, inner_gate)
        of_up = to_up.grad_adapter(grad_up, normed, inner_up)
        grad_normed = to_gate.grad_input(grad_gate, of_gate.inner)
        del normed, grad_gate
        to_up.grad_input(grad_up, of_up.inner, into=grad_normed)
        del grad_up
        grad_middle = rms_norm_backward(grad_normed, middle, weight, ctx.epsilon).add_(grad)
        of_out = to_out.grad_adapter(grad_middle, out, inner_out)
        grad_out = to_out.grad_input(grad_middle, of_out.inner)
        grad_x: Tensor | None = grad_middle
        if rows is not None:
            grad_out, grad_x = _spread(grad_out, rows, ctx.num_tokens), _spread(grad_middle, rows, ctx.num_tokens)
        adapters = of_out, of_gate, of_up, of_down
        return grad_out, grad_x, *[None] * 4, *(one for adapter in adapters for one in adapter.of_tensors)


def _spread(states: Tensor, rows: Tensor, length: int) -> Tensor:
    return states.new_zeros(length, states.shape[1]).index_copy_(0, rows, states)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] turned by each token's place. Su et al. 2021 (arXiv:2104.09864), equation 34, in halves.

    With halves a, b of each head: a cos - b sin, b cos + a sin.
    """
    half = states.shape[-1] // 2
    turned = torch.empty_like(states)
    turned[..., :half], turned[..., half:] = states[..., half:], states[..., :half]
    turned[..., :half].neg_()
    return turned.mul_(sin[:, None]).addcmul_(states, cos[:, None])


def _rotated_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of that."""
    half = grad.shape[-1] // 2
    slanted = grad * sin[:, None]
    turned = grad * cos[:, None]
    turned[..., :half] += slanted[..., half:]
    turned[..., half:] -= slanted[..., :half]
    return turned
