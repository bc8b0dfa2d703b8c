"""Products of matrices by the faster of torch's two libraries: MKL's for small ones, oneDNN's for float32 on a CPU.

torch gives float32 matmuls to MKL, which on AMD's processors uses half the width of their registers. Measured on an
EPYC with AVX-512, 1,024 rows and 384 to 2,048 columns: 95 GFLOP/s of a core by MKL and 225 by oneDNN, with the same
rounding. oneDNN writes code for each shape that it meets (1 ms and 0.5 MB), so callers keep the number of shapes small.
"""

import functools

import torch
from torch import Tensor

SMALLEST = 1 << 20  # number of multiplications from which oneDNN's call, which takes 30 us, is worth it


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x w^T: [T, out] of x [T, in] and w [out, in]. Carries no gradient."""
    if not _is_ours(x, weight):
        return x @ weight.t()
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
    return out


def add_product(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """base + x w^T, a new tensor."""
    if not _is_ours(x, weight):
        return torch.addmm(base, x, weight.t())
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, base, weight, None, "add")
    return out


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right: [a, b] of [T, a] and [T, b], summed over the tokens."""
    if not _is_ours(left.t(), right.t()):
        return left.t() @ right
    if left.shape[1] > right.shape[1]:  # oneDNN is slow where the second matrix is the thin one
        return inner_product(right, left).t()
    return product(left.t(), right.t())


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return is_float32_on_cpu and len(x) * weight.numel() >= SMALLEST and has_onednn()


@functools.cache
def has_onednn() -> bool:
    """Returns True if torch came with oneDNN and its products. They are not public, so a version may lack them."""
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_there and hasattr(torch.ops.mkldnn, "_linear_pointwise")
