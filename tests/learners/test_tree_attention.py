"""Attention over packs: the blocks give what the mask gives, forward and backward, whatever the tree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from art_cli.learners.packs.packing import pack_samples
from art_cli.learners.packs.tree_attention import LONG, ProductAttention, Tree, attend, cut, masked_attention
from art_cli.learners.samples import bare_sample
from art_cli.models.decoder.maths import CALL_COST

KV_HEADS, GROUPS, DIM = 2, 3, 8


def tree_of(token_lists: list[list[int]]) -> Tree:
    samples = [bare_sample(np.array(ids), np.array([], dtype=np.int64), "s") for ids in token_lists]
    [pack] = pack_samples(samples, budget=10_000)
    return Tree.of(pack, torch.device("cpu"))


def states(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Query, key and value, with fewer heads of keys than of queries, laid out as a model's layers make them."""
    generator = torch.Generator().manual_seed(seed)
    heads = (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
    return [
        torch.randn(1, length, n, DIM, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in heads
    ]


def by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k / sqrt D) v over the visible keys, each group of query heads with its key head."""
    key, value = (tensor.repeat_interleave(GROUPS, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10), st.integers(0, 9))
def test_blocks_are_exact(token_lists: list[list[int]], seed: int) -> None:
    """Forward and backward in float64, against the definition with the mask written out."""
    tree = tree_of(token_lists)
    inputs = states(len(tree.depths), seed=seed)
    out, _ = attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=0.3)
    expected = by_definition(*inputs, tree.mask(), 0.3)
    for ours, theirs in zip(with_gradients(out.transpose(1, 2), inputs), with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_long_segments_and_short_ones_are_exact_together() -> None:
    """A short stem over a long segment, under which short ones branch twice; beside it a long one and short ones."""
    stem, long = [1, 2, 3], list(range(10, 10 + 2 * LONG))
    tree = tree_of(
        [
            [*stem, *long, 4, 5, 6],
            [*stem, *long, 4, 5, 7, 8, 9],
            [*stem, *long, 4, 7],
            [*stem, *long[:LONG], 1],
            [*stem, *long[LONG:]],
            [*stem, 8, 9],
            [2, 2, 2],
            [2, 2, 3, 4],
        ]
    )
    assert len(tree.division.blocks) == 4  # the stem, the long segment's two parts, the one beside it
    inputs = states(len(tree.depths))
    out, _ = attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=0.3)
    expected = with_gradients(by_definition(*inputs, tree.mask(), 0.3), inputs)
    for ours, theirs in zip(with_gradients(out.transpose(1, 2), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=30))
def test_each_short_segment_is_computed_once_in_few_calls(token_lists: list[list[int]]) -> None:
    """Trees of under CALL_COST pairs in all are one call: a second would cost more than all the padding."""
    tree = tree_of(token_lists)
    own = torch.cat([batch.own for batch in tree.division.batches])
    assert sorted(own.tolist()) == list(range(len(tree.depths)))
    if len(tree.segments.starts) * 40 * 40 < CALL_COST:
        assert len(tree.division.batches) == 1


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10), st.sampled_from([0, 300])
)
def test_products_are_exact(token_lists: list[list[int]], stem: int) -> None:
    """By products, forward and backward, with query heads that share key heads; large rows under the stem."""
    tree = tree_of([[*range(10, 10 + stem), *ids] for ids in token_lists])
    inputs = states(len(tree.depths))
    out = ProductAttention.apply(*inputs, cut(tree.segments), 0.3)
    expected = with_gradients(by_definition(*inputs, tree.mask(), 0.3), inputs)
    for ours, theirs in zip(with_gradients(out, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_products_serve_trees_whose_pairs_are_mostly_in_large_rows() -> None:
    long, short = list(range(10, 910)), [1, 2, 3]
    assert tree_of([[*long, 1], [*long, 2]]).rows_by_products
    assert not tree_of([[*short, 1], [*short, 2]]).rows_by_products


def test_the_mask_is_the_ancestors() -> None:
    """1 2 3 / 1 2 4 5: rows see 1; 1 2; 1 2 3; 1 2 4; 1 2 4 5."""
    rows = ["10000", "11000", "11100", "11010", "11011"]
    expected = torch.tensor([[c == "1" for c in row] for row in rows])
    assert torch.equal(tree_of([[1, 2, 3], [1, 2, 4, 5]]).mask(), expected)


def test_a_sliding_window_counts_depth_not_place_in_the_pack() -> None:
    """Window 2: the 4 of 1 2 4 sees 2 and 4, though the 3 stands between them in the pack."""
    rows = ["10000", "11000", "01100", "01010", "00011"]
    expected = torch.tensor([[c == "1" for c in row] for row in rows])
    tree = tree_of([[1, 2, 3], [1, 2, 4, 5]])
    assert torch.equal(tree.mask(window=2), expected)
    inputs = states(5)
    out, _ = attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=0.3, sliding_window=2)
    torch.testing.assert_close(out.transpose(1, 2), by_definition(*inputs, expected, 0.3))


def test_long_segments_in_float32_and_bfloat16() -> None:
    """Trees longer than the kernel's inner blocks; bfloat16 within its own rounding of the exact result."""
    stem = list(range(700))
    tree = tree_of([stem + [1000 + i] * 40 for i in range(6)] + [stem[:300] + [2000] * 200])
    exact = [tensor.detach().requires_grad_() for tensor in states(len(tree.depths))]
    expected = with_gradients(by_definition(*exact, tree.mask(), 0.35), exact)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        inputs = states(len(tree.depths), dtype)
        out, _ = attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=0.35)
        for ours, theirs in zip(with_gradients(out.transpose(1, 2), inputs), expected, strict=True):
            assert ours.dtype == dtype
            assert float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm()) < tolerance


def test_the_masked_form_is_the_same_function() -> None:
    """It stands in where the flash kernel for CPUs does not: other devices, sliding windows."""
    tree = tree_of([[1, 2, 3, 4], [1, 2, 5], [6, 7]])
    inputs = states(len(tree.depths))
    expected = with_gradients(by_definition(*inputs, tree.mask(), 0.3), inputs)
    for ours, theirs in zip(with_gradients(masked_attention(*inputs, tree.mask(), 0.3), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(6)}, {"dropout": 0.1}])
def test_refuses_attention_it_does_not_compute(extra: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match="no soft cap, no sinks and no dropout"):
        attend(torch.nn.Module(), *states(3), None, tree=tree_of([[1, 2, 3]]), **extra)
