"""The mathematics of a decoder layer, forward and backward; its products; attentions in a joint call.

The parts are norm, rotary embedding, gate, and linear layer with adapter. Pure functions of tensors and numbers. Below
float32, norms are computed in float32 and rounded like the models do. Adapters stay float32, but are multiplied in the
states' dtype, like autocast.
T tokens; D head size.

Products use the faster one of torch's two libraries. torch gives float32 matmuls to MKL, which uses only half the
register width on AMD processors. Measured on an EPYC with AVX-512, 1,024 rows and 384 to 2,048 columns: 95 GFLOP/s per
core with MKL and 225 with oneDNN, with the same rounding. oneDNN generates code for each new shape (1 ms and 0.5 MB),
so it only gets large products, and callers keep the number of shapes small.

Intel processors use MKL. On a Xeon (AVX-512, family 6, model 207) both give 145 GFLOP/s per core, but oneDNN takes two
to three times longer when summing over an adapter's rank. All row counts are equally fast, so rows need no padding.
bfloat16 without AMX gives 83 GFLOP/s there, so it cannot speed up a step.

Short attentions share a call: neighbors join while their padding costs less than another call, measured on a CPU with
float32. The engine joins prompt chunks this way, the learner short tree segments.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

Item = TypeVar("Item")

CALL_COST = 8192  # query-key pairs attended in the time of one additional call
SMALLEST = 1 << 20  # multiplications that justify oneDNN's call overhead of 30 us


def join_calls(items: Iterable[Item], num_pairs: Callable[[Sequence[Item]], int]) -> list[list[Item]]:
    """Groups neighboring items, in order. `num_pairs`: query-key pairs in one call for a group, including padding."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and num_pairs([*groups[-1], item]) < num_pairs(groups[-1]) + num_pairs([item]) + CALL_COST:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x w^T: [T, out] for x [T, in] and w [out, in]. Carries no gradient."""
    if _is_one_bfloat16_row(x):
        return torch.mv(weight, x[0])[None]
    if not _is_ours(x, weight):
        return x @ weight.t()
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return out


def add_product(base: Tensor, x: Tensor, weight: Tensor, *, is_spare: bool = False) -> Tensor:
    """Returns base + x w^T, a new tensor. `is_spare`: the memory of `base` may be reused."""
    if _is_one_bfloat16_row(x):
        return torch.addmv(base[0], weight, x[0])[None]
    if not _is_ours(x, weight):
        return base.addmm_(x, weight.t()) if is_spare else torch.addmm(base, x, weight.t())
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, base, weight, None, "add")
    return out


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left^T right: [a, b] for [T, a] and [T, b], summed over the tokens."""
    if not _is_ours(left.t(), right.t()):
        return left.t() @ right
    if left.shape[1] > right.shape[1]:  # oneDNN is slow with a thin second matrix
        return inner_product(right, left).t()
    return product(left.t(), right.t())


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return is_float32_on_cpu and len(x) * weight.numel() >= SMALLEST and prefers_onednn()


def _is_one_bfloat16_row(x: Tensor) -> bool:
    """Returns True if oneDNN's matrix-vector product applies, which reads the matrix 1.5 times faster."""
    return len(x) == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def is_shape_costly(dtype: torch.dtype) -> bool:
    """Returns True if CPU products use oneDNN, so callers should keep the number of shapes small."""
    return dtype.itemsize < 4 or prefers_onednn()


@functools.cache
def prefers_onednn() -> bool:
    """Returns True if float32 products use oneDNN: on all processors except Intel's, which MKL is made for."""
    return has_onednn() and not (torch.backends.mkl.is_available() and _is_intel())  # type: ignore[no-untyped-call]


def _is_intel() -> bool:
    path = Path("/proc/cpuinfo")
    return path.exists() and "GenuineIntel" in path.read_text()


@functools.cache
def has_onednn() -> bool:
    """Returns True if torch includes oneDNN and its products. They are private, so a torch version may lack them."""
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Norm(NamedTuple):
    """RMSNorm: w x / rms(x) over the last dimension n. Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4."""

    weight: Tensor
    epsilon: float

    def apply(self, x: Tensor) -> Tensor:
        exact = x.float() if x.dtype.itemsize < 4 else x
        return self.weight * F.rms_norm(exact, x.shape[-1:], None, self.epsilon).to(x.dtype)

    def backward(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of x and w; None for a frozen w.

        With r = 1 / rms and v = w * grad they are r v - x r^3 (x . v) / n, and grad * r x summed over all rows.
        """
        slope = grad * self.weight
        if x.dtype.itemsize < 4:
            x, slope = x.float(), slope.float()
        size = x.shape[-1]
        inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / size + self.epsilon).rsqrt_()
        of_weight = None
        if self.weight.requires_grad:
            of_weight = (x * inverse).mul_(grad).flatten(0, -2).sum(0).to(self.weight.dtype)
        dots = torch.linalg.vecdot(x, slope).unsqueeze(-1)
        slope.mul_(inverse).addcmul_(x, dots.mul_(inverse**3 / -size))
        return slope.to(grad.dtype), of_weight


class Projection(NamedTuple):
    """A linear layer with an optional adapter, W x + bias + s B A x: LoRA, Hu et al. 2021 (arXiv:2106.09685), eq. 3."""

    weight: Tensor  # W, [out, in]
    bias: Tensor | None = None
    down: Tensor | None = None  # A, [rank, in]
    up: Tensor | None = None  # B, [out, rank]
    scaling: float = 0.0
    is_merged: bool = False  # whether to multiply by W + s B A, which for many tokens costs less than three products

    def apply(self, x: Tensor, base: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns [T, out], added to `base` if given; and [T, rank] A x for the backward pass."""
        weight = self._merged() if self.is_merged else self.weight
        out = product(x, weight) if base is None else add_product(base, x, weight)
        if self.bias is not None:
            out.add_(self.bias)
        if self.down is None or self.up is None:
            return out, None
        inner = product(x, self.down.to(x.dtype))
        if self.is_merged:
            return out, inner
        up = self.up.to(x.dtype)
        return add_product(out, inner, up if self.scaling == 1 else up * self.scaling, is_spare=True), inner

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """W, bias, A and B."""
        return (self.weight, self.bias, self.down, self.up)

    def backward(
        self, grad: Tensor, x: Tensor, inner: Tensor | None, into: Tensor | None = None
    ) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        """Returns the gradients of x and of `tensors`; None for frozen tensors.

        `inner`: A x as returned by `apply`. `into`: a gradient of x to accumulate into; it may be overwritten.
        """
        grad_inner, *found = self.backward_tensors(grad, x, inner)
        weight = (self._merged() if self.is_merged else self.weight).t()
        grad_x = product(grad, weight) if into is None else add_product(into, grad, weight, is_spare=True)
        if grad_inner is not None and self.down is not None and not self.is_merged:
            grad_x = add_product(grad_x, grad_inner, self.down.to(grad.dtype).t(), is_spare=True)
        return grad_x, *found

    def backward_tensors(self, grad: Tensor, x: Tensor, inner: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the gradients of A x and `tensors`."""
        of_weight = inner_product(grad, x) if self.weight.requires_grad else None
        of_bias = grad.sum(0) if self.bias is not None and self.bias.requires_grad else None
        if self.down is None or self.up is None or inner is None:
            return None, of_weight, of_bias, None, None
        grad_inner = product(grad, self.up.to(grad.dtype).t()).mul_(self.scaling)
        of_up = inner_product(grad, inner).mul_(self.scaling)
        return grad_inner, of_weight, of_bias, inner_product(grad_inner, x).to(self.down.dtype), of_up.to(self.up.dtype)

    def merging(self) -> "Projection":
        """Sets `is_merged` if this loses nothing: below float32 the sum would round the adapter's change away."""
        if self.down is None or self.up is None:
            return self
        is_exact = self.weight.dtype == self.down.dtype == self.up.dtype and self.weight.dtype.itemsize >= 4
        return self._replace(is_merged=is_exact)

    def _merged(self) -> Tensor:
        """Returns W + s B A."""
        assert self.down is not None and self.up is not None
        return add_product(self.weight, self.up * self.scaling, self.down.t())

    def in_dtype(self, dtype: torch.dtype) -> "Projection":
        """Returns a copy with the adapter in this dtype and the scaling folded into B."""
        if self.down is None or self.up is None:
            return self
        return self._replace(down=self.down.to(dtype), up=self.up.to(dtype) * self.scaling, scaling=1.0)


def signed(sin: Tensor) -> Tensor:
    """Returns the sines in the form `rotate` expects: the first half of every head negated."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns [T, heads, D] rotated by token position; cos and signed sin [T, 1, D].

    Su et al. 2021 (arXiv:2104.09864), equation 34. With halves a, b of each head: a cos - b sin, b cos + a sin.
    """
    return states.roll(states.shape[-1] // 2, -1).mul_(sin).addcmul_(states, cos)


def rotate_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the transpose of `rotate`."""
    half = grad.shape[-1] // 2
    turned, slanted = grad * cos, grad * sin
    turned[..., :half] += slanted[..., half:]
    turned[..., half:] += slanted[..., :half]
    return turned


def gate(gates: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gates) * up. Shazeer 2020 (arXiv:2002.05202), the inside of SwiGLU."""
    return F.silu(gates).mul_(up)


def gate_backward(grad: Tensor, gates: Tensor, up: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gates and up. Overwrites `grad` and `active`, which holds silu(gates)."""
    grad_up = active.mul_(grad)
    grad_gates: Tensor = torch.ops.aten.silu_backward(grad.mul_(up), gates)
    return grad_gates, grad_up
