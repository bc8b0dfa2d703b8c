"""Short segments of a pack's tree, laid side by side, so that one call attends for many of them. On a CPU only.

A call of torch's flash kernel costs as much as about ten thousand pairs of tokens, and a tree of short turns has
hundreds of segments. Each short segment becomes one row. Its queries are its own tokens; its keys, gathered from the
pack, are its short ancestors and itself. Rows of about the same size are padded to one size and computed in one call
under a mask.

A long segment, and every ancestor of a long one, stays a separate block (tree_attention.py). Gathered for each of its
descendants, it would cost more memory than it saves time.

`cut` is for attention by products (product_attention.py), which computes one head of a large row at a time and so can
gather all ancestors: long segments are cut into rows as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.learners.packs.packing import Segments
from art_cli.learners.packs.padding import round_up
from art_cli.models.decoder.shared_calls import join_calls

LONG = 128  # smallest number of tokens of a segment that fills a call alone
PIECE = 384  # largest number of queries of a row that is computed by products; 256 and 512 take 5 % longer
LARGE = 1 << 16  # pairs from which a row is computed alone, head by head


class SegmentBatch(NamedTuple):
    """N rows of at most Q queries and K keys each."""

    queries: Tensor  # [N * Q] positions in the pack; a row is padded with its last one
    keys: Tensor  # [N * K] positions in the pack, padded likewise
    is_query: Tensor  # [N * Q] bool: not padding
    own: Tensor  # [tokens] positions in the pack of the queries that are not padding
    # [N, 1, Q, M] float32 for the last M keys: 0 where the query sees the key, else -inf. Each query sees all keys
    # before them. Padding sees what its copy sees.
    mask: Tensor

    @property
    def num_pairs(self) -> int:
        return len(self.queries) * len(self.keys) // len(self.mask)

    @property
    def is_large(self) -> bool:
        """True for one row that is computed head by head."""
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
    """The segments of a tree that are computed as blocks, and those that are computed in batches."""

    blocks: list[tuple[int, int, int]]  # (start, end, reach)
    batches: list[SegmentBatch]


def divide(segments: Segments) -> Division:
    """Returns the tree's division; every segment is in exactly one of the two."""
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
        [_batch(alike, has_all_keys=True) for alike in join_calls(by_size, _num_pairs)],
    )


def cut(segments: Segments) -> list[SegmentBatch]:
    """Returns all tokens of the tree in rows of at most PIECE queries, with all their ancestors as keys."""
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


def _span(segments: Segments, index: int) -> range:
    return range(segments.starts[index], segments.ends[index])


def _num_pairs(rows: Sequence[_Row]) -> int:
    """Returns the number of pairs in the rows, each padded to the largest."""
    return len(rows) * max(row.num_queries for row in rows) * max(row.num_keys for row in rows)


def _batch(rows: list[_Row], *, num_queries: int = 0, num_keys: int = 0, has_all_keys: bool = False) -> SegmentBatch:
    """Returns the rows padded to those numbers at least. `has_all_keys`: the mask is for all keys."""
    num_queries = max(num_queries, *(row.num_queries for row in rows))
    num_keys = max(num_keys, *(row.num_keys for row in rows))
    first = 0 if has_all_keys else min(len(row.above) for row in rows)
    place, column = np.arange(num_queries), np.arange(first, num_keys)
    queries = [row.start + np.minimum(place, row.num_queries - 1) for row in rows]
    keys = [_padded_keys(row, num_keys) for row in rows]
    is_query = [place < row.num_queries for row in rows]
    # [Q, M] for each row: whether the query sees the key
    sees = [column[None, :] <= len(row.above) + np.minimum(place, row.num_queries - 1)[:, None] for row in rows]
    mask = np.where(np.stack(sees)[:, None], np.float32(0), np.float32(-np.inf))
    positions, is_real = np.concatenate(queries), np.concatenate(is_query)
    arrays = (positions, np.concatenate(keys), is_real, positions[is_real], mask)
    return SegmentBatch(*map(torch.from_numpy, arrays))


def _padded_keys(row: _Row, length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    keys = np.array([*row.above, *range(row.start, row.end)], dtype=np.int64)
    return np.pad(keys, (0, length - len(keys)), mode="edge")
