"""Attention over a pack: every token sees itself and its ancestors in the prefix tree. A transformers attention
function.

It is registered as NAME in transformers' attention interface, so it serves any causal model using the interface. The
model's forward takes the tree as keyword argument `tree`, which its layers pass to `attend`.

    CPU, float32 with long segments      matrix products (ProductAttention)
    CPU, others                          torch's flash kernel, skipping fully masked blocks
    GPU                                  FlexAttention's block mask (flex_attention.py)
    other devices, CPU sliding windows   a dense mask

Flash kernel. A segment attends to itself causally. Its descendants form one contiguous range after it and attend to it
without a mask. Each of these blocks is one kernel call. Partial results are merged by log-sum-exp, as in ring attention
(Liu et al. 2023, arXiv:2310.01889). In the backward pass every block yields its exact part of the gradient, because it
receives the merged result.

A kernel call costs about as much as ten thousand token pairs, and a tree of short turns has hundreds of segments. So
short segments are batched (`divide`), one row per segment. A row's queries are the segment's tokens; its keys, gathered
from the pack, are its short ancestors and the segment itself. Rows of similar size are padded to one size and computed
in one masked call. Long segments and all their ancestors stay separate blocks, because gathering them for every
descendant would cost more memory than it saves time.

Matrix products, for float32 and float64. The flash kernel multiplies in small MKL pieces. Here each row of queries
(`cut`, which also cuts long segments into rows and gathers all ancestors) meets all its keys in one product: large rows
one head at a time through oneDNN (models/decoder/maths.py), short rows for all heads in one bmm call. Query heads with
a common key head are stacked to share its products. The backward pass recomputes the probabilities; the softmax over
whole rows needs no stored log-sum-exp.

    b rows times key heads; R queries per row, stacked over the key head's query heads; K keys; D head width

Packs are padded to few sizes, because CPU matrix products generate code for every new size. Padding is an extra tree
after the others. It is never trained and no sample's token sees it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from art_cli.learners.packs.flex_attention import FlexAttention
from art_cli.learners.packs.packing import Pack, Segments, round_up
from art_cli.learners.samples import Ints
from art_cli.models.decoder.maths import inner_product, join_calls, product

LONG = 128  # minimum segment length that fills a kernel call alone
PIECE = 384  # maximum queries per row for matrix products; 256 and 512 take 5 % longer
LARGE = 1 << 16  # minimum pairs for computing a row separately, head by head
NAME = "art_tree"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def padded(pack: Pack) -> Pack:
    """Pads the pack to the next size by repeating its last token as an extra segment."""
    length = len(pack.token_ids)
    num = round_up(length) - length
    if num == 0:
        return pack
    starts, ends, reaches, parents = pack.segments
    end = length + num
    return replace(
        pack,
        token_ids=np.pad(pack.token_ids, (0, num), mode="edge"),
        depths=np.concatenate([pack.depths, np.arange(num)]),
        segments=Segments([*starts, length], [*ends, end], [*reaches, end], [*parents, -1]),
    )


def padded_rows(positions: Ints, length: int) -> Ints:
    """Returns ascending pack positions, padded with other positions up to the next size."""
    num = min(round_up(len(positions)), length) - len(positions)
    others = np.setdiff1d(np.arange(length), positions, assume_unique=True)[:num]
    return np.sort(np.concatenate([positions, others]))


class SegmentBatch(NamedTuple):
    """N rows with at most Q queries and K keys."""

    queries: Tensor  # [N * Q] pack positions; rows are padded with their last query
    keys: Tensor  # [N * K] pack positions, padded too
    is_query: Tensor  # [N * Q] bool: not padding
    own: Tensor  # [tokens] pack positions of the non-padding queries
    # [N, 1, Q, M] float32 for the last M keys: 0 where the query sees the key, else -inf. Earlier keys are visible to
    # all queries. Padding sees what the padded query sees.
    mask: Tensor

    @property
    def num_pairs(self) -> int:
        return len(self.queries) * len(self.keys) // len(self.mask)

    @property
    def is_large(self) -> bool:
        """Whether this is a single row to be computed head by head."""
        return len(self.mask) == 1 and self.num_pairs >= LARGE


class _Row(NamedTuple):
    start: int
    end: int
    above: list[int]  # positions of the gathered ancestors, ascending

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.num_queries + len(self.above)


class Division(NamedTuple):
    """Segments computed as blocks, and segments computed in batches."""

    blocks: list[tuple[int, int, int]]  # (start, end, reach)
    batches: list[SegmentBatch]


def divide(segments: Segments) -> Division:
    """Divides the tree; every segment is either a block or part of a batch."""
    is_block = [end - start >= LONG for start, end in zip(segments.starts, segments.ends, strict=True)]
    for index in range(len(is_block) - 1, -1, -1):
        parent = segments.parents[index]
        if is_block[index] and parent >= 0:
            is_block[parent] = True
    rows: list[_Row] = []
    above: dict[int, list[int]] = {}
    for index, (start, end, _, parent) in enumerate(zip(*segments, strict=True)):
        if not is_block[index]:
            parent_span = range(segments.starts[parent], segments.ends[parent])
            above[index] = [] if parent < 0 or is_block[parent] else [*above[parent], *parent_span]
            rows.append(_Row(start, end, above[index]))
    by_size = sorted(rows, key=lambda row: (row.num_queries, row.num_keys))
    blocks = zip(segments.starts, segments.ends, segments.reaches, is_block, strict=True)
    return Division(
        [(start, end, reach) for start, end, reach, is_one in blocks if is_one],
        [_batch(alike, has_all_keys=True) for alike in join_calls(by_size, _num_pairs)],
    )


def cut(segments: Segments) -> list[SegmentBatch]:
    """Returns all the tree's tokens in rows of at most PIECE queries, with all ancestors as keys."""
    rows: list[_Row] = []
    paths: list[list[int]] = []
    for start, end, _, parent in zip(*segments, strict=True):
        above = [] if parent < 0 else paths[parent]
        paths.append([*above, *range(start, end)])
        rows += [_Row(at, min(at + PIECE, end), [*above, *range(start, at)]) for at in range(start, end, PIECE)]
    large = [row for row in rows if _num_pairs([row]) >= LARGE]
    small = sorted((row for row in rows if _num_pairs([row]) < LARGE), key=lambda row: (row.num_queries, row.num_keys))
    return [
        *(_batch([row], num_queries=round_up(row.num_queries), num_keys=round_up(row.num_keys)) for row in large),
        *(_batch(alike) for alike in join_calls(small, _num_pairs)),
    ]


def _num_pairs(rows: Sequence[_Row]) -> int:
    """Returns the number of pairs after padding the rows to the largest."""
    return len(rows) * max(row.num_queries for row in rows) * max(row.num_keys for row in rows)


def _batch(rows: list[_Row], *, num_queries: int = 0, num_keys: int = 0, has_all_keys: bool = False) -> SegmentBatch:
    """Pads the rows to at least these sizes. `has_all_keys`: the mask covers all keys."""
    num_queries = max(num_queries, *(row.num_queries for row in rows))
    num_keys = max(num_keys, *(row.num_keys for row in rows))
    first = 0 if has_all_keys else min(len(row.above) for row in rows)
    place, column = np.arange(num_queries), np.arange(first, num_keys)
    queries = [row.start + np.minimum(place, row.num_queries - 1) for row in rows]
    own_keys = [np.array([*row.above, *range(row.start, row.end)], dtype=np.int64) for row in rows]
    keys = [np.pad(each, (0, num_keys - len(each)), mode="edge") for each in own_keys]
    is_query = [place < row.num_queries for row in rows]
    # [Q, M] per row: whether the query sees the key
    sees = [column[None, :] <= len(row.above) + np.minimum(place, row.num_queries - 1)[:, None] for row in rows]
    mask = np.where(np.stack(sees)[:, None], np.float32(0), np.float32(-np.inf))
    positions, is_real = np.concatenate(queries), np.concatenate(is_query)
    arrays = (positions, np.concatenate(keys), is_real, positions[is_real], mask)
    return SegmentBatch(*map(torch.from_numpy, arrays))


class ProductAttention(torch.autograd.Function):
    """[1, heads, T, D] from query [1, heads, T, D] and key, value [1, kv heads, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, batches: list[SegmentBatch], scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.batches, ctx.scale = batches, scale
        out = _like_tokens(query)
        for batch in batches:
            rows = _Rows(batch, query.shape[1] // key.shape[1])
            queries, keys, values = rows.queries(query), rows.keys(key), rows.keys(value)
            parts = [
                _products(rows.probabilities(queries[part], keys[part], scale), values[part].mT)
                for part in rows.parts(len(keys))
            ]
            rows.put(out, _joined(parts))
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With probabilities P and gradient grad v^T for P, softmax's backward gives S, the gradient for the scores.

        The gradients are S k for the queries, S^T q for the keys and P^T grad for the values.
        """
        query, key, value = ctx.saved_tensors
        grad_query = _like_tokens(query)
        grad_key, grad_value = (_like_tokens(states).zero_() for states in (key, value))
        for batch in ctx.batches:
            rows = _Rows(batch, query.shape[1] // key.shape[1])
            queries, keys, values = rows.queries(query), rows.keys(key), rows.keys(value)
            grads = rows.queries(grad, is_zero_padded=True)
            found = []
            for part in rows.parts(len(keys)):
                probabilities = rows.probabilities(queries[part], keys[part], ctx.scale)
                of_probabilities = _products(grads[part], values[part])
                of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, query.dtype)
                del of_probabilities
                of_values = _inner_products(probabilities, grads[part])
                del probabilities
                found.append(
                    (_products(of_scores, keys[part].mT), _inner_products(of_scores, queries[part]), of_values)
                )
            of_queries, of_keys, of_values = (_joined(list(parts)) for parts in zip(*found, strict=True))
            rows.put(grad_query, of_queries)
            rows.add(grad_key, of_keys)
            rows.add(grad_value, of_values)
        grads_out = (grad_query.mul_(ctx.scale), grad_key.mul_(ctx.scale), grad_value)
        return *(states.transpose(0, 1)[None] for states in grads_out), None, None


class _Rows(NamedTuple):
    """Moves a batch's rows out of the pack and back. `groups`: query heads per key head."""

    batch: SegmentBatch
    groups: int

    @property
    def num(self) -> int:
        return len(self.batch.mask)

    def queries(self, states: Tensor, *, is_zero_padded: bool = False) -> Tensor:
        """Returns [b, R, D] from [1, heads, T, D]."""
        rows = _tokens(states).index_select(0, self.batch.queries)
        if is_zero_padded:
            rows.mul_(self.batch.is_query[:, None, None])
        rows = rows.view(self.num, -1, rows.shape[1] // self.groups, self.groups, rows.shape[2])
        stacked = rows.permute(0, 2, 3, 1, 4).contiguous()  # oneDNN is a thousand times slower on strided heads
        return stacked.view(-1, self.groups * rows.shape[1], rows.shape[4])

    def keys(self, states: Tensor) -> Tensor:
        """Returns [b, K, D] from [1, kv heads, T, D]."""
        rows = _tokens(states).index_select(0, self.batch.keys)
        rows = rows.view(self.num, -1, *rows.shape[1:])
        return rows.transpose(1, 2).contiguous().flatten(0, 1)

    def probabilities(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Returns [b, R, K] softmax over the visible keys."""
        mask = self.batch.mask  # [N, 1, Q, M]
        scores = _products(queries * scale, keys)
        by_head = scores.view(self.num, -1, mask.shape[2], keys.shape[1])  # [N, heads, Q, K]
        by_head[..., -mask.shape[3] :].add_(mask)
        return scores.softmax(-1)

    def parts(self, num: int) -> Iterator[slice]:
        """Yields slices to compute together: everything, or one head at a time for a large row."""
        step = 1 if self.batch.is_large else num
        return (slice(start, start + step) for start in range(0, num, step))

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        """Writes [b, R, D] into `tokens` [T, heads, D], without padding."""
        length, width = self.batch.mask.shape[2], rows.shape[2]
        rows = rows.view(self.num, -1, self.groups, length, width).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        tokens[self.batch.own] = rows[self.batch.is_query]

    def add(self, tokens: Tensor, rows: Tensor) -> None:
        """Adds [b, K, D] to `tokens` [T, kv heads, D]."""
        rows = rows.view(self.num, -1, *rows.shape[1:]).transpose(1, 2).reshape(len(self.batch.keys), -1)
        tokens.flatten(1).index_add_(0, self.batch.keys, rows)  # flat, because torch adds wider indices one by one


def _tokens(states: Tensor) -> Tensor:
    """Returns [T, heads, D], a view of [1, heads, T, D]."""
    return states[0].transpose(0, 1)


def _like_tokens(states: Tensor) -> Tensor:
    """Returns an uninitialized [T, heads, D]."""
    return states.new_empty(states.shape[2], states.shape[1], states.shape[3])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Returns [b, x, y] from [b, x, c] and [b, y, c]."""
    return product(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left, right.mT)


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Returns [b, x, y] from [b, c, x] and [b, c, y]."""
    return inner_product(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left.mT, right)


@dataclass(frozen=True, eq=False)
class Tree:
    """A pack's prefix tree in the form used by attention. S segments, T tokens; see `packing.Segments`."""

    segments: Segments
    depths: Tensor  # [T]
    max_depth: int
    rows: Tensor  # predicting positions plus padding, ascending; a layer may compute its output for these only
    flex: FlexAttention | None = None  # the GPU's attention; None on other devices
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # dense masks by window, shared by all layers
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)  # block masks by window, shared too

    @classmethod
    def of(cls, pack: Pack, device: torch.device, flex: FlexAttention | None = None) -> "Tree":
        depths = torch.from_numpy(pack.depths).to(device)
        rows = torch.from_numpy(padded_rows(np.unique(pack.edges.positions), len(pack.token_ids))).to(device)
        return cls(pack.segments, depths, int(pack.depths.max()), rows, flex)

    @cached_property
    def division(self) -> Division:
        """The segments as blocks and batches, computed once for all layers."""
        return divide(self.segments)

    @cached_property
    def rows_by_products(self) -> list[SegmentBatch]:
        """Rows for matrix products; empty if short rows hold most pairs, because the flash kernel is then faster."""
        rows = cut(self.segments)
        in_large = sum(row.num_pairs for row in rows if row.is_large)
        return rows if 2 * in_large > sum(row.num_pairs for row in rows) else []

    def mask(self, window: int | None = None) -> Tensor:
        """Returns [T, T] whether the row's token sees the column's, with `window` only the nearest `window` tokens."""
        if window not in self.masks:
            index = torch.arange(len(self.depths), device=self.depths.device)
            visible = (index[None, :] <= index[:, None]) & (index[:, None] < self._reaches()[None, :])
            if window is not None:
                visible &= self.depths[:, None] - self.depths[None, :] < window
            self.masks[window] = visible
        return self.masks[window]

    def block_mask(self, flex: FlexAttention, window: int | None = None) -> BlockMask:
        """Returns the same mask for `flex`, padded."""
        if window not in self.block_masks:
            self.block_masks[window] = flex.mask(self._reaches(), self.depths, window)
        return self.block_masks[window]

    def _reaches(self) -> Tensor:
        """Returns [T] the end of the last descendant of each token's segment."""
        starts, ends, reaches, _ = self.segments
        whole = np.repeat(reaches, np.subtract(ends, starts))  # torch's repeat_interleave would wait for the GPU
        return torch.from_numpy(whole).to(self.depths.device)


@contextlib.contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Makes the model's layers attend by the `tree` argument inside the block. Only packs can run then."""
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

    Raises NotImplementedError for attention other than softmax(q k) v: soft caps, sinks, dropout.
    """
    if softcap is not None or s_aux is not None or dropout > 0:
        raise NotImplementedError("tree attention has no soft cap, no sinks and no dropout")
    window = sliding_window if sliding_window is not None and sliding_window <= tree.max_depth else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, tree, window, scale).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, window: int | None, scale: float) -> Tensor:
    """Returns [1, heads, T, D], using the method that wastes the fewest masked pairs on this device."""
    flex = tree.flex
    if flex is not None and query.shape[-1] not in flex.works:
        flex.probe(query, key, value, tree.block_mask(flex, window), scale)
    if flex is not None and flex.works[query.shape[-1]]:
        return flex.attend(query, key, value, tree.block_mask(flex, window), scale)
    if window is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        dtype = query.dtype
        if dtype.itemsize < 4:  # in bfloat16 the kernel is three times slower, even on CPUs with AMX
            query, key, value = query.float(), key.float(), value.float()
        found: Tensor = (
            ProductAttention.apply(query, key, value, tree.rows_by_products, scale)  # type: ignore[no-untyped-call]
            if tree.rows_by_products
            else _BlockAttention.apply(query, key, value, tree.division, scale)  # type: ignore[no-untyped-call]
        )
        return found.to(dtype)
    return masked_attention(query, key, value, tree.mask(window), scale)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns [1, heads, T, D] in the plain form: computes all pairs and discards pairs outside `mask` [T, T]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the only kernel supporting both a mask and grouped heads keeps all scores in memory
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class _BlockAttention(torch.autograd.Function):
    """Exact prefix-tree attention, by unmasked or causal blocks and by batches of short segments."""

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
        """Computes the gradient block by block; each block contributes its exact part.

        It uses P = exp(scores - the whole row's log-sum-exp) and D = sum(grad * the whole row's out).
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


def _rows(states: Tensor, positions: Tensor, batch: SegmentBatch) -> Tensor:
    """Returns [N, heads, Q or K, D], the batch's rows taken from [1, heads, T, D]."""
    # `flatten` copies nothing, because the model's layers produce [T, heads, D]
    rows = _tokens(states).flatten(1).index_select(0, positions)
    return rows.view(len(batch.mask), -1, states.shape[1], states.shape[3]).transpose(1, 2)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges one more block's result into `out` and `lse`, in place, giving the softmax over all keys so far."""
    union = torch.logaddexp(lse, part_lse)
    out.mul_((lse - union).exp_().unsqueeze(-1)).add_(part * (part_lse - union).exp_().unsqueeze(-1))
    lse.copy_(union)
