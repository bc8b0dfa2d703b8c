"""Attention over a pack on a GPU: FlexAttention with the tree as its mask. Not the tree itself: see tree_attention.py.

The kernel (Dong et al. 2024, arXiv:2412.05496) skips every block of 128 x 128 pairs in which no pair is visible. It
checks single pairs only in blocks that are partly visible. It is compiled once for each shape and serves every tree of
that shape, because trees differ only in the values of tensors. Packs are padded to the length of the budget, longer
ones to a few lengths above it. A padding token sees itself, and no other token sees it.

The first pack shows whether compiler and kernel work on this machine, forward and backward. If they fail, a warning
says so once and the dense mask is used from then on. A wrong mask is caught elsewhere: packing_check.py compares the
logprobs and the gradient of a run's first packs with plain rows.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from art_cli.learners.packs.packing import round_up
from art_cli.runtime.allocator import is_out_of_memory

log = logging.getLogger(__name__)

BLOCK = 128  # tokens on each side of a block, torch's default; every kernel's tiles divide it
# Queries whose blocks are counted at a time. create_block_mask counts all pairs at once, in 10 bytes a pair: 10.7 GB
# for 32,768 tokens. This many queries take 4 bytes a pair, 134 MB.
QUERIES = 1024
MOST_LENGTHS = 3  # lengths that fit closely; others are doublings, because torch compiles for eight shapes at most
REASON = 300  # characters of a compiler's error to show; the rest is a traceback
ENDLESS = torch.iinfo(torch.int32).max  # horizon of a token that no window hides

Kernel = Callable[..., Tensor]  # called as `flex_attention` is


class FlexAttention:
    """A learner's attention over padded packs. Call `probe` first, and `attend` only if it `works`."""

    def __init__(self, budget: int, kernel: Kernel | None = None) -> None:
        """`budget` is the length of common packs in tokens. Without `kernel` it is torch's, compiled."""
        self.budget, self.kernel = budget, kernel
        self.works: bool | None = None  # None before the probe
        self._lengths: set[int] = set()  # lengths of the masks so far

    def mask(self, reaches: Tensor, depths: Tensor, window: int | None = None) -> BlockMask:
        """Returns the padded pack's mask.

        `reaches` [T] are the positions where the descendants of each token's segment end, `depths` [T] its depth.
        """
        length = self._length_for(len(depths))
        index = torch.arange(length, dtype=torch.int32, device=depths.device)
        reach, depth = index + 1, torch.zeros_like(index)
        reach[: len(reaches)], depth[: len(depths)] = reaches, depths
        horizon = torch.full_like(depth, ENDLESS) if window is None else depth + window

        def is_visible(_batch: Tensor | None, _head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < reach[key]) & (depth[query] < horizon[key])

        some, all_of = [], []
        for queries in torch.split(index, QUERIES):
            pairs = is_visible(None, None, queries[:, None], index[None, :]).view(-1, BLOCK, length // BLOCK, BLOCK)
            some.append(pairs.any(3).any(1))
            all_of.append(pairs.all(3).all(1))
        is_full = torch.cat(all_of)
        blocks = (*_ordered(torch.cat(some) & ~is_full), *_ordered(is_full))
        return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(length, length))

    def _length_for(self, num_tokens: int) -> int:
        """Returns a length that the tokens fit in. There are few of them, because each one is compiled."""
        length = padded_length(num_tokens, self.budget)
        if length not in self._lengths and len(self._lengths) >= MOST_LENGTHS:
            doubled = BLOCK * 2 ** (length // BLOCK - 1).bit_length()
            length = min(each for each in (*self._lengths, doubled) if each >= num_tokens)
        self._lengths.add(length)
        return length

    def probe(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> None:
        """Sets `works` after a forward and a backward pass on copies of these. Raises nothing but out of memory."""
        try:
            _check_widths(query, value)
            self.kernel = self.kernel or torch.compile(flex_attention, dynamic=False, fullgraph=True)
            query, key, value = (states.detach().requires_grad_() for states in (query, key, value))
            with torch.enable_grad():
                out = self.attend(query, key, value, mask, scale)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
            if out.is_cuda:
                torch.cuda.synchronize()  # a kernel's failure is raised only after it has run
            self.works = True
        except Exception as error:  # the boundary to the compiler, its toolchain and the kernel
            if is_out_of_memory(error):
                raise  # a dense mask would need more memory
            self.works = False
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
            log.warning("no FlexAttention (%s); attending by a dense mask, slower", reason)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        """Returns [1, heads, T, D] from query [1, heads, T, D] and key, value [1, kv heads, T, D], T before padding."""
        assert self.kernel is not None, "probe() comes first"
        inputs = (query, key, value)
        needs_gradient = torch.is_grad_enabled() and any(states.requires_grad for states in inputs)
        # all inputs need a gradient in every call, because the kernel is compiled anew for each other combination
        with torch.enable_grad():
            padded = [_pad(states, mask.shape[-1]) for states in inputs]
            out = self.kernel(*padded, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        out = out[:, :, : query.shape[2]]
        return out if needs_gradient else out.detach()


def padded_length(num_tokens: int, budget: int) -> int:
    """Returns the budget in whole blocks, or if the tokens do not fit, the next of eight lengths per doubling."""
    blocks = -(-budget // BLOCK)
    return BLOCK * (blocks if num_tokens <= blocks * BLOCK else round_up(-(-num_tokens // BLOCK)))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [1, 1, Q] the number of blocks in each row of [Q, K], and [1, 1, Q, K] their columns, then the others."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], columns.int()[None, None]


def _pad(states: Tensor, length: int) -> Tensor:
    """Returns [1, heads, length, D], contiguous, with a gradient required."""
    if not states.requires_grad:
        states = states.detach().requires_grad_()
    return F.pad(states, (0, 0, 0, length - states.shape[2])).contiguous()


def _check_widths(*inputs: Tensor) -> None:
    for width in {states.shape[-1] for states in inputs}:
        if width < 16 or width & (width - 1):
            raise NotImplementedError(f"heads are {width} wide, not a power of two of at least 16")
