"""Attention over a pack's tree by matrix products and a softmax, for float32 and float64 on a CPU.

torch's flash kernel multiplies in MKL's small pieces. Here each row of queries (segment_batches.cut) meets all its keys
at once: large rows one head at a time, by oneDNN (models/decoder/products.py), and short rows of all heads in one call
of bmm. Query heads that share a key head are stacked, so that they share its products. The backward pass computes the
probabilities again, and the softmax over whole rows needs no log-sum-exp to be kept.

b rows times key heads; R queries of a row, stacked for the query heads of a key head; K keys; D numbers of a head.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from art_cli.learners.packs.segment_batches import SegmentBatch
from art_cli.models.decoder.products import inner_product, product


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
        """With probabilities P and their gradient grad v^T, softmax's backward gives the scores' gradient S.

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
    """The way of a batch's rows out of the pack and back. `groups`: query heads of a key head."""

    batch: SegmentBatch
    groups: int

    @property
    def num(self) -> int:
        return len(self.batch.mask)

    def queries(self, states: Tensor, *, is_zero_padded: bool = False) -> Tensor:
        """Returns [b, R, D] of [1, heads, T, D]."""
        rows = _tokens(states).index_select(0, self.batch.queries)
        if is_zero_padded:
            rows.mul_(self.batch.is_query[:, None, None])
        rows = rows.view(self.num, -1, rows.shape[1] // self.groups, self.groups, rows.shape[2])
        stacked = rows.permute(0, 2, 3, 1, 4).contiguous()  # oneDNN is a thousand times slower on strided heads
        return stacked.view(-1, self.groups * rows.shape[1], rows.shape[4])

    def keys(self, states: Tensor) -> Tensor:
        """Returns [b, K, D] of [1, kv heads, T, D]."""
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
        """Yields the parts that are computed together: everything, or one head of a large row."""
        step = 1 if self.batch.is_large else num
        return (slice(start, start + step) for start in range(0, num, step))

    def put(self, tokens: Tensor, rows: Tensor) -> None:
        """Puts [b, R, D] into `tokens` [T, heads, D], without the padding."""
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
    """Returns [T, heads, D], not filled."""
    return states.new_empty(states.shape[2], states.shape[1], states.shape[3])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Returns [b, x, y] of [b, x, c] and [b, y, c]."""
    return product(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left, right.mT)


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Returns [b, x, y] of [b, c, x] and [b, c, y]."""
    return inner_product(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left.mT, right)
