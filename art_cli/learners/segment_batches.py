"""Short segments of a pack's tree, laid side by side, so that one call attends for many of them. On a CPU only.

A call of torch's flash kernel costs as much as about ten thousand pairs of tokens, and a tree of short turns has
hundreds of segments. Each short segment becomes one row. Its queries are its own tokens; its keys, gathered from the
pack, are its short ancestors and itself. Rows of about the same size are padded to one size and computed in one call
under a mask.

A long segment, and every ancestor of a long one, stays a block of its own (tree_attention.py). Gathered for each of its
descendants, it would cost more memory than it saves time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.decoder.calls import join_calls
from art_cli.learners.packing import Segments

LONG = 128  # smallest number of tokens of a segment that fills a call of its own


class SegmentBatch(NamedTuple):
    """N rows of at most Q queries and K keys each."""

    queries: Tensor  # [N * Q] positions in the pack; a row is padded with its last one
    keys: Tensor  # [N * K] positions in the pack, padded likewise
    is_query: Tensor  # [N * Q] bool: not padding
    own: Tensor  # [tokens] positions in the pack of the queries that are not padding
    mask: Tensor  # [N, 1, Q, K] float32: 0 where the query sees the key, else -inf; padding sees what its copy sees


class _Row(NamedTuple):
    start: int
    end: int
    above: list[int]  # positions of the gathered ancestors

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.num_queries + len(self.above)


class Division(NamedTuple):
    """The segments of a tree that are computed as blocks, and those that are computed in batches."""

    blocks: list[tuple[int, int, int]]  # (start, end, reach)
    batches: list[SegmentBatch]


def divide(segments: Segments) -> Division:
    """The tree's division; every segment is in exactly one of the two."""
    is_block = [end - start >= LONG for start, end in zip(segments.starts, segments.ends, strict=True)]
    for index in range(len(is_block) - 1, -1, -1):
        parent = segments.parents[index]
        if is_block[index] and parent >= 0:
            is_block[parent] = True
    rows: list[_Row] = []
    above: dict[int, list[int]] = {}
    for index, (start, end, _, parent) in enumerate(zip(*segments, strict=True)):
        if not is_block[index]:
            above[index] = [] if parent < 0 or is_block[parent] else [*above[parent], *_span(segments, parent)]
            rows.append(_Row(start, end, above[index]))
    by_size = sorted(rows, key=lambda row: (row.num_queries, row.num_keys))
    blocks = zip(segments.starts, segments.ends, segments.reaches, is_block, strict=True)
    return Division(
        [(start, end, reach) for start, end, reach, is_one in blocks if is_one],
        [_batch(alike) for alike in join_calls(by_size, _num_pairs)],
    )


def _span(segments: Segments, index: int) -> range:
    return range(segments.starts[index], segments.ends[index])


def _num_pairs(rows: Sequence[_Row]) -> int:
    """The number of pairs in the rows, each padded to the largest."""
    return len(rows) * max(row.num_queries for row in rows) * max(row.num_keys for row in rows)


def _batch(rows: list[_Row]) -> SegmentBatch:
    num_queries, num_keys = max(row.num_queries for row in rows), max(row.num_keys for row in rows)
    place, column = np.arange(num_queries), np.arange(num_keys)
    queries = [row.start + np.minimum(place, row.num_queries - 1) for row in rows]
    keys = [_padded_keys(row, num_keys) for row in rows]
    is_query = [place < row.num_queries for row in rows]
    # [Q, K] for each row: whether the query sees the key
    sees = [column[None, :] <= len(row.above) + np.minimum(place, row.num_queries - 1)[:, None] for row in rows]
    mask = np.where(np.stack(sees)[:, None], np.float32(0), np.float32(-np.inf))
    positions, is_real = np.concatenate(queries), np.concatenate(is_query)
    arrays = (positions, np.concatenate(keys), is_real, positions[is_real], mask)
    return SegmentBatch(*map(torch.from_numpy, arrays))


def _padded_keys(row: _Row, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    keys = np.array([*row.above, *range(row.start, row.end)], dtype=np.int64)
    return np.pad(keys, (0, length - len(keys)), mode="edge")
