"""Attention over a pack on a GPU: FlexAttention with the tree as its mask. Not the tree itself: see tree_attention.py.

The kernel (Dong et al. 2024, arXiv:2412.05496) skips every block of 128 x 128 pairs none of which is visible and asks
for single pairs only in blocks that are visible in part. It is compiled for one shape and serves every tree in it:
packs are padded to the length of the budget, a longer one to that length doubled until it fits, and what tells trees
apart are tensors. A padding token sees itself, and nobody sees it.

Whether compiler and kernel work here is found out on the first pack, forward and backward; where they do not, that is
said once and the dense mask serves from then on. That a mask which is wrong trains nothing does not rest on this file:
a run's first batch is held against plain rows, logprobs and gradient (packing_check.py), and rows win.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

log = logging.getLogger(__name__)

BLOCK = 128  # create_block_mask's own; the tiles of every kernel divide it
REASON = 300  # characters of a compiler's error that tell what failed; more is the way it came
ENDLESS = torch.iinfo(torch.int32).max

Kernel = Callable[..., Tensor]  # called as `flex_attention` is


class FlexAttention:
    """A learner's attention over padded packs; `settle` comes first, and `attend` where it `works`."""

    def __init__(self, budget: int, kernel: Kernel | None = None) -> None:
        """`budget`: tokens of the packs that are common. `kernel`: None for torch's, compiled."""
        self.budget, self.kernel = budget, kernel
        self.works: bool | None = None  # None: not yet known

    def mask(self, reaches: Tensor, depths: Tensor, window: int | None = None) -> BlockMask:
        """The padded pack's mask, from [T] where the descendants of each token's segment end, and [T] depths."""
        length = padded_length(len(depths), self.budget)
        index = torch.arange(length, dtype=torch.int32, device=depths.device)
        reach, depth = index + 1, torch.zeros_like(index)
        reach[: len(reaches)], depth[: len(depths)] = reaches, depths
        horizon = torch.full_like(depth, ENDLESS) if window is None else depth + window

        def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < reach[key]) & (depth[query] < horizon[key])

        return create_block_mask(is_visible, None, None, length, length, device=depths.device, BLOCK_SIZE=BLOCK)

    def settle(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> None:
        """Finds out, once, whether it works: on copies of these, forward and backward. Raises only OutOfMemoryError."""
        try:
            _check_widths(query, value)
            self.kernel = self.kernel or torch.compile(flex_attention, dynamic=False, fullgraph=True)
            query, key, value = (states.detach().requires_grad_() for states in (query, key, value))
            with torch.enable_grad():
                out = self.attend(query, key, value, mask, scale)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
            if out.is_cuda:
                torch.cuda.synchronize()  # a kernel's failure shows when it has run
            self.works = True
        except torch.OutOfMemoryError:
            raise  # a dense mask would need more
        except Exception as error:  # the compiler, its toolchain and the kernel each have errors of their own
            self.works = False
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
            log.warning("no FlexAttention (%s); attending by a dense mask, slower", reason)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        """[1, heads, T, D] from query [1, heads, T, D] and key, value [1, kv heads, T, D], T before padding."""
        assert self.kernel is not None, "settle() comes first"
        inputs = (query, key, value)
        needs_gradient = torch.is_grad_enabled() and any(states.requires_grad for states in inputs)
        with torch.enable_grad():  # which inputs need one is part of what is compiled for: always all
            padded = [_pad(states, mask.shape[-1]) for states in inputs]
            out = self.kernel(*padded, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        out = out[:, :, : query.shape[2]]
        return out if needs_gradient else out.detach()


def padded_length(num_tokens: int, budget: int) -> int:
    """The budget in whole blocks, doubled until the tokens fit: few lengths, each of which is compiled once."""
    length = -(-budget // BLOCK) * BLOCK
    while length < num_tokens:
        length *= 2
    return length


def _pad(states: Tensor, length: int) -> Tensor:
    """[1, heads, length, D], contiguous and in need of a gradient."""
    if not states.requires_grad:
        states = states.detach().requires_grad_()
    return F.pad(states, (0, 0, 0, length - states.shape[2])).contiguous()


def _check_widths(*inputs: Tensor) -> None:
    for width in {states.shape[-1] for states in inputs}:
        if width < 16 or width & (width - 1):
            raise NotImplementedError(f"heads are {width} wide, not a power of two of at least 16")
