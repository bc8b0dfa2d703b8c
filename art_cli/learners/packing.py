"""Packs: rows of tokens in which every token that samples share stands once. Numpy only; no model, no loss.

The samples of a pack form a prefix tree. Sorted, each differs from the one before it in a suffix only, and these
suffixes, one after the other, are the pack:

    samples          pack             segments (start, end, reach)          attention: token k is seen by token q
    1 2 3 4 5        1 2 3 4 5 6 7 8  [1 2 3] 0 3 8                         exactly when k <= q < reach of k's segment
    1 2 3 6 7                         [4 5]   3 5 5
    1 2 3 6 8                         [6]     5 6 8     [7] 6 7 7   [8] 7 8 8

The tree is laid out depth first, so the descendants of a segment are the stretch of tokens from its end to its reach.
That is the whole attention mask.

A trained token is an edge of the tree, from the position that predicts it to its own. Samples may share an edge with
different weights: its logprob is computed once and enters the loss in several terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from art_cli.learners.samples import Ints, Sample
from art_cli.learners.token_weights import Floats

PACK_COST = 256  # tokens' worth of time that one more forward and backward pass takes besides its tokens

SLACK = 1.1  # how many times the fewest tokens may be computed for the sake of smaller packs


class Segments(NamedTuple):
    """The pack's tree: S stretches of tokens that are always seen together, in depth-first order."""

    starts: list[int]  # [S]
    ends: list[int]  # [S]
    reaches: list[int]  # [S] where the last descendant ends; equal to `ends` for a leaf
    parents: list[int]  # [S] -1: a root


class Edges(NamedTuple):
    """The distinct logprobs to compute. E edges."""

    positions: Ints  # [E] of the pack, whose hidden state predicts
    targets: Ints  # [E] the predicted token's id
    temperatures: Floats  # [E]


class Terms(NamedTuple):
    """The trained tokens of the pack's samples, sample after sample. N terms."""

    edges: Ints  # [N] which edge
    samples: Ints  # [N] which sample of the pack
    weights: Floats  # [3, N] in each component of the loss (token_weights.py); NaN: not in it
    logprobs: Floats  # [N] the engine's; NaN where it sampled from a cut distribution
    raw_logprobs: Floats  # [N] the engine's, under softmax(logits); NaN where it did not say


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack:
    """One row of T tokens for the model, and what is trained in it."""

    token_ids: Ints  # [T]
    depths: Ints  # [T] how many tokens come before it in its sample: the position id
    segments: Segments
    edges: Edges
    terms: Terms
    samples: list[Sample]


def pack_samples(samples: Sequence[Sample], *, budget: int, share: bool = True) -> list[Pack]:
    """Packs of at most `budget` tokens that hold every sample once; a longer sample gets a pack of its own.

    With `share`, what samples have in common is laid out once, across turns, trajectories and groups; where a tree does
    not fit one pack, it is cut where that repeats least. Without it, every sample is a tree of its own. The order of
    `samples` does not matter. No samples give no packs.
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
    """How many tokens rows compute for each one that a tree of all samples does: 1 where they share nothing."""
    flat = sum(len(sample.token_ids) for sample in samples)
    return flat / max(1, flat - sum(_sorted(samples)[1]))


def pack_small(samples: Sequence[Sample], *, budgets: Sequence[int], share: bool = True) -> list[Pack]:
    """The packs of the smallest of ascending `budgets` that computes at most SLACK times the tokens of the largest.

    A small pack takes less memory and stays in caches; one that is too small for its trees computes stems again.
    """
    if not share:
        return pack_samples(samples, budget=budgets[0], share=False)
    choices = [pack_samples(samples, budget=budget) for budget in budgets]
    tokens = [sum(len(pack.token_ids) for pack in packs) for packs in choices]
    return next(packs for packs, count in zip(choices, tokens, strict=True) if count <= SLACK * tokens[-1])


def _sorted(samples: Sequence[Sample]) -> tuple[list[Sample], list[int]]:
    """The samples side by side with those they share most with, and how many leading tokens each has of the last."""
    ordered = sorted(samples, key=lambda sample: sample.token_ids.tobytes())
    return ordered, [0, *map(_common_prefix, ordered[:-1], ordered[1:])]


def _common_prefix(left: Sample, right: Sample) -> int:
    """How many leading tokens the two have in common."""
    length = min(len(left.token_ids), len(right.token_ids))
    differs = left.token_ids[:length] != right.token_ids[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _cut(lengths: Ints, shared: Ints, budget: int) -> list[int]:
    """The bounds [0, ..., number of samples] of the runs that become packs, of least cost.

    A run costs its distinct tokens and PACK_COST; its first sample shares nothing. Shortest path over the samples.
    """
    num_samples = len(lengths)
    total = np.concatenate([[0], np.cumsum(lengths - shared)])  # distinct tokens of the samples before each
    if total[-1] <= budget:
        return [0, num_samples] if num_samples else [0]
    floor = total[:-1] - shared  # a run from a sample up to `end` has total[end] - floor tokens
    firsts = np.searchsorted(total, total - budget)  # no run up to `end` may start before
    entry = np.zeros(num_samples)  # the least cost of all runs before a sample, and of starting another there
    best = np.zeros(num_samples + 1, dtype=np.int64)  # where the run that ends there starts
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
    """The suffix that one sample adds: its tokens from `depth` on stand at position depth + shift."""

    depth: int
    shift: int


def _lay_out(samples: list[Sample], shared: list[int]) -> Pack:
    """The pack of sorted samples, each of which has `shared` leading tokens in common with the one before it."""
    path: list[_Run] = []  # from the root to the current sample's end
    starts, parents = [], []  # of each run: its first position, the position it grows from (-1: none)
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
    before = np.arange(-1, size - 1)  # the position that predicts each
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
    """Where the tokens at `depths` of the sample that ends `path` stand in the pack."""
    if not len(depths) or depths[0] >= path[-1].depth:  # all in the sample's own suffix
        return depths + path[-1].shift
    runs = np.searchsorted([run.depth for run in path], depths, side="right") - 1
    shifts: Ints = np.array([run.shift for run in path])[runs]
    return depths + shifts


def _segments(starts: list[int], parents: list[int], size: int) -> Segments:
    """The runs, cut wherever another run grows out of their middle."""
    grows_from = dict(zip(starts, parents, strict=True))
    cuts = {parent + 1 for parent in parents if parent >= 0}
    bounds = sorted(grows_from.keys() | cuts)
    ends = [*bounds[1:], size]
    owner = dict(zip(ends, range(len(ends)), strict=True))  # a parent position is always the last of its segment
    segment_parents = []
    for start in bounds:
        parent = grows_from.get(start, start - 1)  # what starts at a cut goes on from the token before it
        segment_parents.append(owner[parent + 1] if parent >= 0 else -1)
    reaches = list(ends)
    for index in range(len(bounds) - 1, -1, -1):
        parent = segment_parents[index]
        if parent >= 0:
            reaches[parent] = max(reaches[parent], reaches[index])
    return Segments(bounds, ends, reaches, segment_parents)


def _merge_edges(token_ids: Ints, before: Ints, predicted: Ints, temperatures: Floats) -> tuple[Edges, Ints]:
    """The distinct edges, and which of them each term is. An edge is known by where it ends and its temperature."""
    kinds, kind_of = np.unique(temperatures, return_inverse=True)
    _, first, edge_of = np.unique(predicted * len(kinds) + kind_of, return_index=True, return_inverse=True)
    ends = predicted[first]
    return Edges(before[ends], token_ids[ends], temperatures[first]), edge_of
