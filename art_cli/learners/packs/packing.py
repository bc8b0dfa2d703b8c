"""Packs: token rows in which every shared token is stored once. Numpy only; no model, no loss.

A pack's samples form a prefix tree. After sorting, each sample differs from its predecessor only by a suffix, and the
concatenated suffixes are the pack:

    samples          pack             segments (start, end, reach)          attention: token k is seen by token q
    1 2 3 4 5        1 2 3 4 5 6 7 8  [1 2 3] 0 3 8                         exactly when k <= q < reach of k's segment
    1 2 3 6 7                         [4 5]   3 5 5
    1 2 3 6 8                         [6]     5 6 8     [7] 6 7 7   [8] 7 8 8

The tree is laid out depth first, so a segment's descendants are the tokens from its end to its reach. This defines the
whole attention mask.

A trained token is a tree edge, from the predicting position to the token's position. Samples may share an edge with
different weights: its logprob is computed once and enters the loss in several terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from art_cli.learners.samples import Floats, Ints, Sample, common_prefix

PACK_COST = 256  # fixed time per forward and backward pass, in token equivalents

SMALLEST = 8  # padded pack sizes are multiples of this
SLACK = 1.1  # largest acceptable ratio of computed tokens to the minimum, when choosing smaller packs


def round_up(num: int) -> int:
    """Rounds up to one of eight sizes per doubling: 8, 16, ... 128, 144, ... 256, 288, ... 512, 576, ..."""
    step = max(SMALLEST, 2 ** ((num - 1).bit_length() - 4)) if num > 1 else SMALLEST
    return -(-num // step) * step


class Segments(NamedTuple):
    """The pack's tree: S runs of tokens that are always seen together, in depth-first order."""

    starts: list[int]  # [S]
    ends: list[int]  # [S]
    reaches: list[int]  # [S] end of the last descendant; equal to `ends` for a leaf
    parents: list[int]  # [S] index of the parent segment; -1: a root


class Edges(NamedTuple):
    """The E distinct logprobs to compute."""

    positions: Ints  # [E] pack positions whose hidden state predicts the target
    targets: Ints  # [E] target token ids
    temperatures: Floats  # [E]


class Terms(NamedTuple):
    """The N trained tokens in the pack's samples, sample by sample."""

    edges: Ints  # [N] index of the term's edge
    samples: Ints  # [N] index of the term's sample in the pack
    weights: Floats  # [5, N] by Row (../samples.py); NaN: the term is not in the row
    logprobs: Floats  # [N] engine logprobs; NaN: truncated sampling, or not sampled
    raw_logprobs: Floats  # [N] engine logprobs under softmax(logits); NaN: not reported


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack:
    """One row of T tokens for the model, with its trained tokens."""

    token_ids: Ints  # [T]
    depths: Ints  # [T] depth in the sample, which is the position id
    segments: Segments
    edges: Edges
    terms: Terms
    samples: list[Sample]


def pack_samples(samples: Sequence[Sample], *, budget: int, share: bool = True) -> list[Pack]:
    """Packs all samples, using at most `budget` tokens per pack; longer samples get separate packs.

    With `share`, common tokens are laid out once, across turns, trajectories and groups. A tree that exceeds one pack
    is cut where the fewest tokens are repeated. Without `share`, every sample is a separate tree. The order of
    `samples` does not matter. An empty input gives no packs.
    """
    if share:
        ordered, shared = _sorted(samples)
    else:
        ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
        shared = [0] * len(ordered)
    bounds = _cut(np.array([len(sample.token_ids) for sample in ordered]), np.array(shared), budget)
    return [
        _lay_out(ordered[start:end], [0, *shared[start + 1 : end]])
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def reuse(samples: Sequence[Sample]) -> float:
    """Returns the ratio of tokens in plain rows to tokens in one tree over all samples; 1 if nothing is shared."""
    flat = sum(len(sample.token_ids) for sample in samples)
    return flat / max(1, flat - sum(_sorted(samples)[1]))


def pack_small(samples: Sequence[Sample], *, budgets: Sequence[int], share: bool = True) -> list[Pack]:
    """Packs with the smallest of the ascending `budgets` that needs at most SLACK times the largest budget's tokens.

    Small packs take less memory and stay in caches. Packs too small for their trees recompute shared tokens.
    """
    if not share:
        return pack_samples(samples, budget=budgets[0], share=False)
    choices = [pack_samples(samples, budget=budget) for budget in budgets]
    tokens = [sum(len(pack.token_ids) for pack in packs) for packs in choices]
    return next(packs for packs, count in zip(choices, tokens, strict=True) if count <= SLACK * tokens[-1])


def _sorted(samples: Sequence[Sample]) -> tuple[list[Sample], list[int]]:
    """Returns the samples sorted by tokens, and the number of leading tokens shared with the predecessor."""
    ordered = sorted(samples, key=lambda sample: sample.token_ids.tobytes())
    rows = [sample.token_ids for sample in ordered]
    return ordered, [0, *map(common_prefix, rows[:-1], rows[1:])]


def _cut(lengths: Ints, shared: Ints, budget: int) -> list[int]:
    """Returns the bounds [0, ..., number of samples] of the cheapest division into packs.

    A pack costs its distinct tokens plus PACK_COST; its initial sample shares nothing. This is a shortest path over the
    samples.
    """
    num_samples = len(lengths)
    total = np.concatenate([[0], np.cumsum(lengths - shared)])  # number of distinct tokens before each sample
    if total[-1] <= budget:
        return [0, num_samples] if num_samples else [0]
    floor = total[:-1] - shared  # a pack from a sample up to `end` has total[end] - floor tokens
    firsts = np.searchsorted(total, total - budget)  # earliest possible start for a pack up to `end`
    # least cost of all packs before a sample, plus the cost of starting another pack there
    entry = np.zeros(num_samples)
    best = np.zeros(num_samples + 1, dtype=np.int64)  # start of the pack that ends at each bound
    for end in range(1, num_samples + 1):
        first = min(int(firsts[end]), end - 1)
        fits = floor[first:end] >= total[end] - budget
        fits[-1] = True
        start = first + int(np.where(fits, entry[first:end], np.inf).argmin())
        best[end] = start
        if end < num_samples:
            entry[end] = entry[start] + PACK_COST + shared[end]
    bounds = [num_samples]
    while bounds[-1]:
        bounds.append(int(best[bounds[-1]]))
    return bounds[::-1]


class _Run(NamedTuple):
    """The suffix added by one sample: its token at depth d >= `depth` has pack position d + shift."""

    depth: int
    shift: int


def _lay_out(samples: list[Sample], shared: list[int]) -> Pack:
    """Lays out sorted samples as a pack; `shared` counts the leading tokens each sample shares with its predecessor."""
    path: list[_Run] = []  # runs in the current sample, root to leaf
    starts, parents = [], []  # each run's start position, and the position it continues (-1: none)
    ids, depths, predicted = [], [], []
    size = 0
    for sample, depth in zip(samples, shared, strict=True):
        while path and path[-1].depth >= depth:
            path.pop()
        length = len(sample.token_ids)
        if length > depth:
            starts.append(size)
            parents.append(depth - 1 + path[-1].shift if path else -1)
            ids.append(sample.token_ids[depth:])
            depths.append(np.arange(depth, length))
            path.append(_Run(depth, size - depth))
            size += length - depth
        predicted.append(_positions(path, sample.targets))
    token_ids = np.concatenate(ids)
    before = np.arange(-1, size - 1)  # the position that predicts each position
    before[starts] = parents
    terms_of = [len(sample.targets) for sample in samples]
    edges, edge_of = _merge_edges(
        token_ids,
        before,
        np.concatenate(predicted),
        np.concatenate([sample.temperatures for sample in samples]),
    )
    return Pack(
        token_ids=token_ids,
        depths=np.concatenate(depths),
        segments=_segments(starts, parents, size),
        edges=edges,
        terms=Terms(
            edges=edge_of,
            samples=np.repeat(np.arange(len(samples)), terms_of),
            weights=np.concatenate([sample.weights for sample in samples], axis=1),
            logprobs=np.concatenate([sample.logprobs for sample in samples]),
            raw_logprobs=np.concatenate([sample.raw_logprobs for sample in samples]),
        ),
        samples=samples,
    )


def _positions(path: list[_Run], depths: Ints) -> Ints:
    """Returns pack positions for the tokens at `depths` in the sample that `path` leads to."""
    if not len(depths) or depths[0] >= path[-1].depth:  # all tokens are in the sample's suffix
        return depths + path[-1].shift
    runs = np.searchsorted([run.depth for run in path], depths, side="right") - 1
    shifts: Ints = np.array([run.shift for run in path])[runs]
    return depths + shifts


def _segments(starts: list[int], parents: list[int], size: int) -> Segments:
    """Returns the runs as segments, cut wherever another run branches off."""
    grows_from = dict(zip(starts, parents, strict=True))
    cuts = {parent + 1 for parent in parents if parent >= 0}
    bounds = sorted(grows_from.keys() | cuts)
    ends = [*bounds[1:], size]
    owner = dict(zip(ends, range(len(ends)), strict=True))  # a parent position is always the last in its segment
    segment_parents = []
    for start in bounds:
        parent = grows_from.get(start, start - 1)  # a segment that starts at a cut continues the token before it
        segment_parents.append(owner[parent + 1] if parent >= 0 else -1)
    reaches = list(ends)
    for index in range(len(bounds) - 1, -1, -1):
        parent = segment_parents[index]
        if parent >= 0:
            reaches[parent] = max(reaches[parent], reaches[index])
    return Segments(bounds, ends, reaches, segment_parents)


def _merge_edges(token_ids: Ints, before: Ints, predicted: Ints, temperatures: Floats) -> tuple[Edges, Ints]:
    """Returns the distinct edges, and each term's edge index. Edges differ in end position or temperature."""
    kinds, kind_of = np.unique(temperatures, return_inverse=True)
    _, first, edge_of = np.unique(predicted * len(kinds) + kind_of, return_index=True, return_inverse=True)
    ends = predicted[first]
    return Edges(before[ends], token_ids[ends], temperatures[first]), edge_of
