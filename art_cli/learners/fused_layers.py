"""Layers of common models computed with fewer passes over memory, which keep less of it for the backward pass.

While a learner runs the model, three kinds of modules get a forward of this file instead of their own; whatever else a
model is made of runs as it is. They compute the same sums, forward and backward:

    LoRA on a frozen linear layer  W x + s B A x    PEFT makes three matrices of the output's size, here there is one
    RMSNorm with a frozen weight   w x / rms(x)     backward in four passes instead of eight; in float32 inside
    gated MLP                      silu(a) * b      silu(a) is computed again in the backward pass, not kept

Adapters stay float32; beside a base in bfloat16 their products are taken in bfloat16, as autocast would.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def fused_layers(model: Any) -> Iterator[None]:
    """While inside, the model's layers that are known here are computed by it."""
    changed = []
    try:
        for module in model.modules():
            forward = _lora_linear(module) or _rms_norm(module) or _gated_mlp(module)
            if forward is not None:
                module.forward = forward
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


# --- which modules are known, and what is computed in their place -----------------------------------------------------


class Lora(NamedTuple):
    """The adapter of one linear layer: s B A x."""

    down: Tensor  # A, [rank, in]
    up: Tensor  # B, [out, rank]
    scaling: float


def plain_lora(layer: Any) -> Lora | None:
    """PEFT's plain LoRA around a frozen linear layer, one adapter active; None for anything else."""
    from peft.tuners.lora.layer import Linear

    module: Any = layer
    if type(layer) is not Linear or len(module.active_adapters) != 1:
        return None
    base, [name] = module.base_layer, module.active_adapters
    is_plain = type(base) is torch.nn.Linear and not (module.merged or module.fan_in_fan_out or module.lora_variant)
    if not is_plain or name not in module.lora_A or _is_trained(base) or module.lora_B[name].bias is not None:
        return None
    if type(module.lora_dropout[name]) is not torch.nn.Identity:
        return None
    return Lora(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def _lora_linear(module: Any) -> Forward | None:
    if plain_lora(module) is None:
        return None
    base, [name] = module.base_layer, module.active_adapters

    def forward(x: Tensor) -> Tensor:
        if module.disable_adapters:
            plain: Tensor = base(x)
            return plain
        # looked up at every call: sharding puts whole tensors in place of the shards only while a layer runs
        down, up, scaling = module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = _LoraLinear.apply(rows, base.weight, base.bias, down, up, scaling)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)

    return forward


def is_frozen_norm(module: Any) -> bool:
    """The one of Llama, Mistral and Qwen; Gemma's, which counts its weight from 1, has other attributes."""
    is_known = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return is_known and not _is_trained(module)


def _rms_norm(module: Any) -> Forward | None:
    if not is_frozen_norm(module):
        return None
    return lambda x: _RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]


def _gated_mlp(module: Any) -> Forward | None:
    if {name for name, _ in module.named_children()} != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    return lambda x: module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-untyped-call]


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


# --- the mathematics --------------------------------------------------------------------------------------------------


class _LoraLinear(torch.autograd.Function):
    """[T, out] W x + bias + s B A x of x [T, in]. LoRA, Hu et al. 2021 (arXiv:2106.09685), equation 3."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        inner = x @ down.to(x.dtype).t()  # [T, rank]
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(inner, up.to(x.dtype).t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, inner = ctx.saved_tensors
        grad_inner = (grad @ up.to(grad.dtype)).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_inner, down.to(grad.dtype))
        grad_up = (grad.t() @ inner).mul_(ctx.scaling)
        return grad_x, None, None, (grad_inner.t() @ x).to(down.dtype), grad_up.to(up.dtype), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return rms_norm(x, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return rms_norm_backward(grad, x, weight, ctx.epsilon), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """w x / rms(x) over the last dimension n. Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4."""
    exact = x.float() if x.dtype.itemsize < 4 else x
    return weight * F.rms_norm(exact, x.shape[-1:], None, epsilon).to(x.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The gradient of x. With r = 1 / rms and v = w * grad: r v - x r^3 (x . v) / n."""
    slope = grad * weight
    if x.dtype.itemsize < 4:
        x, slope = x.float(), slope.float()
    size = x.shape[-1]
    inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / size + epsilon).rsqrt_()
    dots = torch.linalg.vecdot(x, slope).unsqueeze(-1)
    slope.mul_(inverse).addcmul_(x, dots.mul_(inverse**3 / -size))
    return slope.to(grad.dtype)


class _Gated(torch.autograd.Function):
    """silu(gate) * up. Shazeer 2020 (arXiv:2002.05202), the inside of SwiGLU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up
