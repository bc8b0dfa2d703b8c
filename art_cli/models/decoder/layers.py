"""Layers with gradients that need fewer passes over memory than the model's own, and keep less for the backward pass.

`known_layers` temporarily changes a model's modules. The sums stay the same, forward and backward:

    a known layer                       two autograd functions around its attention (see the picture in forward.py)
    LoRA projections in other layers    W x + s B A x with one matrix of the output's size, PEFT makes three
    other frozen RMSNorms, gated MLPs   one function each

With the model's own layers, autograd keeps every input to every product and norm. The two functions keep x, y, the
heads before their norms, gate and up, and recompute the remaining elementwise operations. After attention, the last
layer only computes tokens that predict something, because nothing reads the others.

The caller compares these layers with the model's own layers on packs before use.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from art_cli.models.decoder.forward import (
    Layer,
    Unknown,
    attention_inputs,
    is_silu,
    layer_outputs,
    read_layer,
    read_norm,
    read_projection,
)
from art_cli.models.decoder.maths import (
    Norm,
    Projection,
    gate,
    gate_backward,
    prefers_onednn,
    rotate_backward,
    signed,
)

Attend = Callable[..., tuple[Tensor, None]]  # a function for transformers' AttentionInterface
Forward = Callable[..., Tensor]

# Sequence length, in model widths, above which MKL multiplies faster by weights merged with the adapter. With 135M
# parameters (width 576) and 780 tokens, merging takes 4.3 ms a layer, and separate products 2.2 ms.
LONG = 2.5


class TreeLike(Protocol):
    """The argument `tree` to the model's forward."""

    rows: Tensor  # positions of predicting tokens, ascending


@contextlib.contextmanager
def known_layers(model: Any, attend: Attend) -> Iterator[None]:
    """Inside, known modules are computed here; whole layers only if they receive a `tree`."""
    layers = getattr(model.base_model, "layers", [])
    changed = []
    try:
        for module in model.modules():
            forward = _projection(module) or _norm(module) or _gated_mlp(module)
            if forward is not None:
                module.forward = forward
                changed.append(module)
        for layer in layers:
            if _is_known(layer):
                layer.forward = _layer(layer, attend, is_last=layer is layers[-1])
                changed.append(layer)
        yield
    finally:
        for module in changed:
            del module.forward


# --- known modules and their replacements -----------------------------------------------------------------------------


def _is_known(layer: Any) -> bool:
    with contextlib.suppress(Unknown):
        read_layer(layer)
        return True
    return False


def _layer(layer: Any, attend: Attend, *, is_last: bool) -> Forward:
    own: Forward = layer.forward

    def forward(hidden: Tensor, **given: Any) -> Tensor:
        tree: TreeLike | None = given.get("tree")
        cos, sin = given["position_embeddings"]
        if tree is None or cos.shape[-1] != layer.self_attn.head_dim:  # the rotary embedding covers only part of a head
            return own(hidden, **given)
        run = partial(_run, layer, attend, cos=cos[0], sin=sin[0], tree=tree, rows=tree.rows if is_last else None)
        if layer.gradient_checkpointing and layer.training:
            kept: Tensor = layer._gradient_checkpointing_func(run, hidden)
            return kept
        return run(hidden)

    return forward


def _run(
    module: Any, attend: Attend, hidden: Tensor, *, cos: Tensor, sin: Tensor, tree: TreeLike, rows: Tensor | None
) -> Tensor:
    """Returns [1, T, hidden]; with `rows`, only these rows."""
    # read on every call, because sharding puts whole tensors in place only while a layer runs
    layer = read_layer(module)
    if prefers_onednn() or len(hidden[0]) > LONG * hidden.shape[-1]:
        layer = layer.merging()
    query, key, value = _Inputs.apply(hidden[0], cos, sin, layer, *layer.input_tensors)  # type: ignore[no-untyped-call]
    heads = (states.transpose(0, 1)[None] for states in (query, key, value))
    out, _ = attend(module.self_attn, *heads, None, tree=tree, scaling=layer.scaling, sliding_window=layer.window)
    result: Tensor = _Outputs.apply(out[0].flatten(1), hidden[0], rows, layer, *layer.output_tensors)  # type: ignore[no-untyped-call]
    return result


def _projection(module: Any) -> Forward | None:
    """Replaces LoRA around a frozen linear layer."""
    if not hasattr(module, "base_layer") or _is_trained(module.base_layer):
        return None
    try:
        read_projection(module)
    except Unknown:
        return None

    def forward(x: Tensor) -> Tensor:
        projection = read_projection(module)  # read on every call, as above; adapters may be off
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _Project.apply(rows, projection, projection.down, projection.up)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    return forward


def _norm(module: Any) -> Forward | None:
    with contextlib.suppress(Unknown):
        read_norm(module)
        if not _is_trained(module):
            return lambda x: _Norm.apply(x, read_norm(module))  # type: ignore[no-untyped-call]
    return None


def _gated_mlp(module: Any) -> Forward | None:
    children = {name for name, _ in module.named_children()}
    if children != {"gate_proj", "up_proj", "down_proj", "act_fn"} or not is_silu(module.act_fn):
        return None
    return lambda x: module.down_proj(_Gate.apply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-untyped-call]


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


# --- the two functions of a layer -------------------------------------------------------------------------------------


class _Inputs(torch.autograd.Function):
    """Query, key and value [T, heads, D] for x [T, hidden]; cos and sin [T, D]; `tensors`: `layer.input_tensors`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        found = attention_inputs(layer, x, cos[:, None], signed(sin)[:, None])
        ctx.save_for_backward(x, cos, sin, *(found.before or (None, None)), *found.inners)
        ctx.layer = layer
        return found.query, found.key, found.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        x, cos, sin, query, key, *inners = ctx.saved_tensors  # read once: checkpointing recomputes them at each reading
        cos, sin = cos[:, None], signed(sin)[:, None]
        grad_query, grad_key = (rotate_backward(grad, cos, sin) for grad in grads[:2])
        of_norms: list[Tensor | None] = [None, None]
        if layer.head_norms is not None:
            norm_query, norm_key = layer.head_norms
            grad_query, of_norms[0] = norm_query.backward(grad_query, query)
            grad_key, of_norms[1] = norm_key.backward(grad_key, key)
        normed = layer.attention_norm.apply(x)
        needs_normed: bool = ctx.needs_input_grad[0] or layer.attention_norm.weight.requires_grad
        total: Tensor | None = None
        of_projections: list[Tensor | None] = []
        inputs = zip(layer.projections[:3], (grad_query, grad_key, grads[2]), inners, strict=True)
        for projection, grad, inner in inputs:
            if needs_normed:
                total, *found = projection.backward(grad.flatten(1), normed, inner, into=total)
            else:
                _, *found = projection.backward_tensors(grad.flatten(1), normed, inner)
            of_projections += found
        grad_x, of_norm = (None, None) if total is None else layer.attention_norm.backward(total, x)
        return grad_x, None, None, None, of_norm, *of_norms, *of_projections


class _Outputs(torch.autograd.Function):
    """[1, T, hidden] layer result when attention gave `out` [T, heads * D] for x [T, hidden]; optionally `rows` only.

    `tensors`: `layer.output_tensors`. The result is not a view, because FSDP2 sets hooks on it that views may lose.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, rows: Tensor | None, layer: Layer, *tensors: Tensor | None) -> Tensor:
        ctx.layer, ctx.num_tokens = layer, len(x)
        if rows is not None:
            out, x = out[rows], x[rows]
        found = layer_outputs(layer, out, x)
        ctx.save_for_backward(out, rows, found.middle, found.gates, found.up, *found.inners)
        return found.result.unsqueeze_(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Layer = ctx.layer
        grad = grad[0]
        out, rows, middle, gates, up, inner_out, inner_gate, inner_up, inner_down = ctx.saved_tensors  # once, as above
        active = F.silu(gates)
        grad_hidden, *of_down = layer.down.backward(grad, active * up, inner_down)
        grad_gates, grad_up = gate_backward(grad_hidden, gates, up, active)
        del grad_hidden, active
        normed = layer.mlp_norm.apply(middle)
        grad_normed, *of_gate = layer.gate.backward(grad_gates, normed, inner_gate)
        del grad_gates
        grad_normed, *of_up = layer.up.backward(grad_up, normed, inner_up, into=grad_normed)
        del normed, grad_up
        grad_middle, of_norm = layer.mlp_norm.backward(grad_normed, middle)
        grad_middle.add_(grad)
        grad_out, *of_out = layer.out.backward(grad_middle, out, inner_out)
        grad_x = grad_middle
        if rows is not None:
            grad_out, grad_x = (_spread(states, rows, ctx.num_tokens) for states in (grad_out, grad_middle))
        return grad_out, grad_x, None, None, of_norm, *of_out, *of_gate, *of_up, *of_down


def _spread(states: Tensor, rows: Tensor, length: int) -> Tensor:
    return states.new_zeros(length, states.shape[1]).index_copy_(0, rows, states)


# --- one function for one module --------------------------------------------------------------------------------------


class _Project(torch.autograd.Function):
    """[T, out] for x [T, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Projection, down: Tensor | None, up: Tensor | None) -> Tensor:
        out, inner = projection.apply(x)
        ctx.save_for_backward(x, inner)
        ctx.projection = projection
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        projection: Projection = ctx.projection
        if not ctx.needs_input_grad[0]:
            return None, None, *projection.backward_tensors(grad, x, inner)[3:]
        grad_x, *found = projection.backward(grad, x, inner)
        return grad_x, None, *found[2:]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.apply(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.norm.backward(grad, x)[0], None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gates, up)
        return gate(gates, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gates, up = ctx.saved_tensors
        return gate_backward(grad.clone(), gates, up, F.silu(gates))
