"""Attention over a pack: every token sees its ancestors in the prefix tree, and itself. A function for transformers.

It is registered under NAME with transformers' attention interface, so it serves any causal model that uses that
interface. The model's forward takes the tree as the keyword argument `tree` and its layers pass it on to `attend`.

On a CPU, float32 trees with long segments are computed by matrix products (product_attention.py). Others use torch's
flash kernel and no block that is masked whole. A segment attends to itself causally. All its descendants lie in one
stretch behind it and attend to it without a mask. Each of these blocks is one call of the kernel. The partial results
are merged by their log-sum-exp, as in ring attention (Liu et al. 2023, arXiv:2310.01889). In the backward pass each
block yields its exact part of the gradient, because it is given the merged result.

On a GPU the same pairs are the block mask of FlexAttention (flex_attention.py). Other devices, and sliding windows on a
CPU, use a dense mask.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from art_cli.learners.packs.flex_attention import FlexAttention
from art_cli.learners.packs.packing import Pack, Segments
from art_cli.learners.packs.padding import padded_rows
from art_cli.learners.packs.product_attention import ProductAttention
from art_cli.learners.packs.segment_batches import Division, SegmentBatch, cut, divide

NAME = "art_tree"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Tree:
    """A pack's prefix tree as attention needs it. S segments, T tokens; see `packing.Segments`."""

    segments: Segments
    depths: Tensor  # [T]
    max_depth: int
    rows: Tensor  # positions that predict, ascending, and padding; a layer may compute its output for these only
    flex: FlexAttention | None = None  # the GPU's attention, or None on another device
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # dense masks by window, shared by all layers
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)  # block masks by window, shared likewise

    @classmethod
    def of(cls, pack: Pack, device: torch.device, flex: FlexAttention | None = None) -> "Tree":
        depths = torch.from_numpy(pack.depths).to(device)
        rows = torch.from_numpy(padded_rows(np.unique(pack.edges.positions), len(pack.token_ids))).to(device)
        return cls(pack.segments, depths, int(pack.depths.max()), rows, flex)

    @cached_property
    def division(self) -> Division:
        """Returns the segments as blocks and batches, computed once for all layers."""
        return divide(self.segments)

    @cached_property
    def rows_by_products(self) -> list[SegmentBatch]:
        """Returns the same for attention by products; empty if short rows hold most pairs (for the flash kernel)."""
        rows = cut(self.segments)
        in_large = sum(row.num_pairs for row in rows if row.is_large)
        return rows if 2 * in_large > sum(row.num_pairs for row in rows) else []

    def mask(self, window: int | None = None) -> Tensor:
        """Returns [T, T] whether the row's token sees the column's; with `window`, only the nearest `window` tokens."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def block_mask(self, flex: FlexAttention, window: int | None = None) -> BlockMask:
        """Returns the same mask for `flex`, padded."""
        if window not in self.block_masks:
            self.block_masks[window] = flex.mask(self._reaches(), self.depths, window)
        return self.block_masks[window]

    def _reaches(self) -> Tensor:
        """Returns [T] where the last descendant of each token's segment ends."""
        starts, ends, reaches, _ = (
            torch.tensor(of_segments, device=self.depths.device) for of_segments in self.segments
        )
        return reaches.repeat_interleave(ends - starts)

    def _make_mask(self, window: int | None) -> Tensor:
        index = torch.arange(len(self.depths), device=self.depths.device)
        visible = (index[None, :] <= index[:, None]) & (index[:, None] < self._reaches()[None, :])
        if window is not None:
            visible &= self.depths[:, None] - self.depths[None, :] < window
        return visible


@contextlib.contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Has the model's layers, inside the block, attend by the `tree` given to its forward, for packs only."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, heads, D] from query [1, heads, T, D] and key, value [1, kv heads, T, D], as transformers does.

    Raises NotImplementedError for attention that is not softmax(q k) v: soft caps, sinks, dropout.
    """
    if softcap is not None or s_aux is not None or dropout > 0:
        raise NotImplementedError("tree attention has no soft cap, no sinks and no dropout")
    window = sliding_window if sliding_window is not None and sliding_window <= tree.max_depth else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, tree, window, scale).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, window: int | None, scale: float) -> Tensor:
    """Returns [1, heads, T, D], computed in the way that wastes the fewest masked pairs on this device."""
    flex = tree.flex
    if flex is not None and flex.works is None:
        flex.probe(query, key, value, tree.block_mask(flex, window), scale)
    if flex is not None and flex.works:
        return flex.attend(query, key, value, tree.block_mask(flex, window), scale)
    if window is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        if query.dtype.itemsize >= 4 and tree.rows_by_products:
            exact: Tensor = ProductAttention.apply(query, key, value, tree.rows_by_products, scale)  # type: ignore[no-untyped-call]
            return exact
        out: Tensor = _BlockAttention.apply(query, key, value, tree.division, scale)  # type: ignore[no-untyped-call]
        return out
    return masked_attention(query, key, value, tree.mask(window), scale)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns [1, heads, T, D]: the plain form. It computes all pairs and discards those outside `mask` [T, T]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the only kernel that takes both a mask and grouped heads holds all scores at once
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class _BlockAttention(torch.autograd.Function):
    """Exact attention of a prefix tree, by unmasked or causal blocks and by batches of short segments."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, division: Division, scale: float) -> Tensor:
        dtype = torch.float32 if query.dtype.itemsize < 4 else query.dtype
        out = torch.empty_like(query, dtype=dtype)
        lse = torch.empty(query.shape[:-1], dtype=dtype)
        for batch in division.batches:
            inputs = (
                _rows(query, batch.queries, batch),
                _rows(key, batch.keys, batch),
                _rows(value, batch.keys, batch),
            )
            part, part_lse = _flash(*inputs, 0.0, False, attn_mask=batch.mask.to(dtype), scale=scale)
            _tokens(out)[batch.own] = part.transpose(1, 2).flatten(0, 1)[batch.is_query].to(dtype)
            lse[0][:, batch.own] = part_lse.transpose(0, 1).flatten(1)[:, batch.is_query]
        for start, end, _ in division.blocks:
            own = slice(start, end)
            out[:, :, own], lse[:, :, own] = _flash(
                query[:, :, own], key[:, :, own], value[:, :, own], 0.0, True, scale=scale
            )
        for start, end, reach in division.blocks:
            if reach > end:
                own, below = slice(start, end), slice(end, reach)
                part, part_lse = _flash(query[:, :, below], key[:, :, own], value[:, :, own], 0.0, False, scale=scale)
                _merge(out[:, :, below], lse[:, :, below], part, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.division, ctx.scale = division, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Each block's gradient is its exact part of the whole.

        It is computed with P = exp(scores - the whole row's log-sum-exp) and D = sum(grad * the whole row's out).
        """
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        for batch in ctx.division.batches:
            whole_lse = lse[0].index_select(1, batch.queries).masked_fill_(~batch.is_query, torch.inf)  # padding: P = 0
            num = len(batch.mask)
            parts = _flash_backward(
                *(_rows(tensor, batch.queries, batch) for tensor in (grad, query)),
                *(_rows(tensor, batch.keys, batch) for tensor in (key, value)),
                _rows(out, batch.queries, batch),
                whole_lse.unflatten(1, (num, -1)).transpose(0, 1).contiguous(),
                0.0,
                False,
                attn_mask=batch.mask.to(lse.dtype),
                scale=ctx.scale,
            )
            for total, where, part in zip(grads, (batch.queries, batch.keys, batch.keys), parts, strict=True):
                _tokens(total).index_add_(0, where, part.transpose(1, 2).flatten(0, 1).to(total.dtype))
        for start, end, reach in ctx.division.blocks:
            own = slice(start, end)
            for rows, is_causal in ((own, True), (slice(end, reach), False)):
                if rows.start == rows.stop:
                    continue
                parts = _flash_backward(
                    grad[:, :, rows],
                    query[:, :, rows],
                    key[:, :, own],
                    value[:, :, own],
                    out[:, :, rows],
                    lse[:, :, rows],
                    0.0,
                    is_causal,
                    scale=ctx.scale,
                )
                for total, where, part in zip(grads, (rows, own, own), parts, strict=True):
                    total[:, :, where] += part
        return *(total.to(query.dtype) for total in grads), None, None


def _tokens(states: Tensor) -> Tensor:
    """Returns [T, heads, D], a view of [1, heads, T, D]."""
    return states[0].transpose(0, 1)


def _rows(states: Tensor, positions: Tensor, batch: SegmentBatch) -> Tensor:
    """Returns [N, heads, Q or K, D] the batch's rows, taken from [1, heads, T, D]."""
    # `flatten` copies nothing, because the model's layers make [T, heads, D]
    rows = _tokens(states).flatten(1).index_select(0, positions)
    return rows.view(len(batch.mask), -1, states.shape[1], states.shape[3]).transpose(1, 2)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the result for one more block of keys into `out` and `lse`, in place: the softmax over all keys so far."""
    union = torch.logaddexp(lse, part_lse)
    out.mul_((lse - union).exp_().unsqueeze(-1)).add_(part * (part_lse - union).exp_().unsqueeze(-1))
    lse.copy_(union)
