"""Attention over a pack on a GPU: FlexAttention with the tree as its mask. See tree_attention.py for the tree itself.

The kernel (Dong et al. 2024, arXiv:2412.05496) skips 128 x 128 blocks without visible pairs and checks individual pairs
only in partly visible blocks. It is compiled once per shape and serves every tree with that shape, because trees differ
only in tensor values. Packs are padded to the budget's length, longer packs to a few larger lengths. A padding token
sees only itself and is seen by no other token.

The initial pack tests whether compiler and kernel work on this machine, forward and backward, for each width of heads
that the model has. Where they fail, the dense mask is used from then on, after one warning. A wrong mask is caught
elsewhere: packing_check.py compares the logprobs and the gradient for a run's initial packs with plain rows.
"""

import functools
import logging
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from art_cli.learners.packs.packing import round_up
from art_cli.runtime.allocator import is_out_of_memory

log = logging.getLogger(__name__)

BLOCK = 128  # tokens per block side, torch's default; divisible by all kernels' tile sizes
# Queries per chunk when counting blocks. create_block_mask counts all pairs together at 10 bytes per pair: 10.7 GB for
# 32,768 tokens. This chunk size needs 4 bytes per pair, 134 MB.
QUERIES = 1024
MOST_LENGTHS = 3  # closely fitting lengths; later lengths are doublings, because torch compiles at most eight shapes
REASON = 300  # characters of a compiler error to show; the rest is a traceback
ENDLESS = torch.iinfo(torch.int32).max  # horizon for tokens not hidden by a window

Kernel = Callable[..., Tensor]  # same signature as `flex_attention`


class FlexAttention:
    """A learner's attention over padded packs. Call `probe` for each head width, and `attend` only if it `works`."""

    def __init__(self, budget: int, kernel: Kernel | None = None) -> None:
        """`budget` is the usual pack length in tokens. The default `kernel` is torch's, compiled."""
        self.budget, self.kernel = budget, kernel
        self.works: dict[int, bool] = {}  # by head width, once probed; the layers of some models have two widths
        self._lengths: set[int] = set()  # mask lengths used so far

    def mask(self, reaches: Tensor, depths: Tensor, window: int | None = None) -> BlockMask:
        """Returns the padded pack's mask.

        `reaches` [T] is the end position of each token's segment descendants, `depths` [T] each token's depth.
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
        """Returns a length that fits the tokens. Few distinct lengths are used, because each one is compiled."""
        length = padded_length(num_tokens, self.budget)
        if length not in self._lengths and len(self._lengths) >= MOST_LENGTHS:
            doubled = BLOCK * 2 ** (length // BLOCK - 1).bit_length()
            length = min(each for each in (*self._lengths, doubled) if each >= num_tokens)
        self._lengths.add(length)
        return length

    def probe(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> None:
        """Sets `works` after a forward and a backward pass on copies of the inputs. Only raises for out of memory."""
        head_width = query.shape[-1]
        try:
            for width in {head_width, value.shape[-1]}:
                if width < 16 or width & (width - 1):
                    raise NotImplementedError(f"heads are {width} wide, not a power of two of at least 16")
            query, key, value = (states.detach().requires_grad_() for states in (query, key, value))
            with torch.enable_grad():
                out = self.attend(query, key, value, mask, scale)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
            if out.is_cuda:
                torch.cuda.synchronize(out.device)  # kernel failures surface only after the kernel has run
            self.works[head_width] = True
        except Exception as error:  # boundary to the compiler, its toolchain and the kernel
            if is_out_of_memory(error):
                raise  # a dense mask would need even more memory
            self.works[head_width] = False
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON]
            log.warning("no FlexAttention (%s); attending by a dense mask, slower", reason)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
        """Returns [1, heads, T, D] for query [1, heads, T, D] and key, value [1, kv heads, T, D], without padding."""
        inputs = (query, key, value)
        kernel = self.kernel or _compiled(*((states.shape[1], states.shape[3], states.dtype) for states in inputs))
        needs_gradient = torch.is_grad_enabled() and any(states.requires_grad for states in inputs)
        # all inputs always require a gradient, because every combination of requires_grad would trigger a new
        # compilation
        with torch.enable_grad():
            padded = [_pad(states, mask.shape[-1]) for states in inputs]
            out = kernel(*padded, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        out = out[:, :, : query.shape[2]]
        return out if needs_gradient else out.detach()


@functools.cache
def _compiled(*heads: tuple[int, int, torch.dtype]) -> Kernel:
    """Returns torch's kernel for heads of these numbers, widths and dtypes.

    torch compiles at most eight shapes of a code object. Each kernel has its own, so that the lengths of a teacher, or
    of layers with other heads, do not count with the policy's.
    """
    function = flex_attention
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)


def padded_length(num_tokens: int, budget: int) -> int:
    """Returns the budget in whole blocks, or for more tokens the next of eight lengths per doubling."""
    blocks = -(-budget // BLOCK)
    return BLOCK * (blocks if num_tokens <= blocks * BLOCK else round_up(-(-num_tokens // BLOCK)))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the block count of each row of [Q, K], [1, 1, Q], and columns, the row's blocks first, [1, 1, Q, K]."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], columns.int()[None, None]


def _pad(states: Tensor, length: int) -> Tensor:
    """Returns [1, heads, length, D], contiguous, requiring a gradient."""
    if not states.requires_grad:
        states = states.detach().requires_grad_()
    return F.pad(states, (0, 0, 0, length - states.shape[2])).contiguous()
