"""Bounds on the difference of faster layers from the model's numbers: one table by dtype, for engine and learner.

Both ways are the same sums in another order, so they differ by rounding, and a table bounds it. In some models
(sharp attention, many layers) one rounding of the embeddings alone moves the numbers further, and there the bound is
wider. Measured on random models of 2 to 28 layers in float32, float16 and bfloat16, faster layers are 0.03 to 3 such
movements away from the model's own layers. It runs no model: the caller does, both ways.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Gap(NamedTuple):
    """The difference between two ways of computing a model. Example: Gap(2e-7, 1e-6)."""

    logprob: float  # nats
    gradient: float = 0.0  # norm of the difference, relative to the gradient's norm; 0: not compared

    def is_within(self, bound: "Gap") -> bool:
        return self.logprob <= bound.logprob and self.gradient <= bound.gradient


# Gaps that are rounding at a glance; at the right the largest that were measured. A wrong mask gives 0.02 nats and up,
# and 0.3 of the gradient and up.
BOUNDS = {
    torch.float64: Gap(1e-4, 1e-3),
    torch.float32: Gap(1e-4, 1e-3),  # 2e-6 nats and 3e-6, with sharp attention 4e-3 nats and 2e-2
    torch.float16: Gap(1e-2, 0.05),  # 4e-3 nats and 8e-3
    torch.bfloat16: Gap(3e-2, 0.1),  # 3e-2 nats and 6e-2
}
ROUNDINGS = 8  # number of the model's own movements by rounding that a gap may have
LIMIT = Gap(0.1, 0.25)  # beyond it rounding looks like another model


def bound_of(dtype: torch.dtype, gap: Gap, rounding: Callable[[], Gap]) -> Gap:
    """Returns the largest gap that is rounding.

    `rounding` measures the model's own movement, where the table does not do.
    """
    bound = BOUNDS[dtype]
    if gap.is_within(bound):
        return bound
    moved = rounding()
    return Gap(*(max(low, min(ROUNDINGS * own, high)) for low, own, high in zip(bound, moved, LIMIT, strict=True)))


@contextlib.contextmanager
def rounded_otherwise(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """While inside, each number of the model's embeddings is one rounding up or down of what it was."""
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
    """The gap of two [L, V] matrices of logprobs: the mean over the vocabulary, weighted by `found`; the worst row."""
    return Gap((found.exp() * (found - own).abs()).sum(-1).max().item())
