"""Packs: every sample is in there once and whole, every shared token once, and nobody sees what it must not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.learners.packs.packing import PACK_COST, Pack, pack_samples, pack_small, reuse
from art_cli.learners.samples import Sample, bare_sample


def sample(token_ids: list[int], targets: list[int] | None = None, name: str = "s", temperature: float = 1.0) -> Sample:
    wanted = np.array(range(1, len(token_ids)) if targets is None else targets, dtype=np.int64)
    return bare_sample(np.array(token_ids), wanted, name, temperature=temperature)


def pack_of(*token_ids: list[int]) -> Pack:
    [pack] = pack_samples([sample(ids) for ids in token_ids], budget=1000)
    return pack


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    return [
        sample(
            ids,
            draw(st.lists(st.integers(1, len(ids) - 1), unique=True).map(sorted)) if len(ids) > 1 else [],
            f"s{index}",
            draw(st.sampled_from([1.0, 0.5])),
        )
        for index, ids in enumerate(draw(sequences))
    ]


def ancestors(pack: Pack, position: int) -> list[int]:
    """The positions that the token sees, by the rule of the module's docstring, in order."""
    starts, ends, reaches, _ = pack.segments
    reach_of = {k: reach for start, end, reach in zip(starts, ends, reaches, strict=True) for k in range(start, end)}
    return [k for k in range(position + 1) if position < reach_of[k]]


def test_the_example_of_the_docstring() -> None:
    pack = pack_of([1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 6, 8])
    assert pack.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pack.depths.tolist() == [0, 1, 2, 3, 4, 3, 4, 4]
    starts, ends, reaches, parents = pack.segments
    assert list(zip(starts, ends, reaches, parents, strict=True)) == [
        (0, 3, 8, -1),
        (3, 5, 5, 0),
        (5, 6, 8, 0),
        (6, 7, 7, 2),
        (7, 8, 8, 2),
    ]


def test_children_of_one_token_are_targets_of_one_position() -> None:
    """From the 2 on, 3 and 4 are predicted: two edges from position 1."""
    pack = pack_of([1, 2, 3], [1, 2, 4])
    edges = sorted(zip(pack.edges.positions.tolist(), pack.edges.targets.tolist(), strict=True))
    assert edges == [(0, 2), (1, 3), (1, 4)]
    assert len(pack.terms.edges) == 4


@given(sample_lists(), st.integers(1, 40), st.booleans())
def test_terms_are_the_samples_tokens_with_what_is_known_of_them(
    samples: list[Sample], budget: int, share: bool
) -> None:
    """Followed back from the pack: what the predicting position sees is the sample up to the target."""
    packs = pack_samples(samples, budget=budget, share=share)
    found = []
    for pack in packs:
        for edge, index in zip(pack.terms.edges, pack.terms.samples, strict=True):
            position, target, temperature = (column[edge] for column in pack.edges)
            seen = pack.token_ids[ancestors(pack, int(position))].tolist()
            found.append((pack.samples[index].trajectory_id, len(seen), (*seen, int(target)), float(temperature)))
    wanted = [
        (each.trajectory_id, int(target), tuple(each.token_ids[: target + 1].tolist()), each.temperatures[0])
        for each in samples
        for target in each.targets
    ]
    assert sorted(found) == sorted(wanted)


@given(sequences)
def test_every_shared_token_stands_once(token_lists: list[list[int]]) -> None:
    """As many tokens as there are distinct prefixes, each seeing exactly its own prefix, at its depth."""
    prefixes = {tuple(ids[:length]) for ids in token_lists for length in range(1, len(ids) + 1)}
    pack = pack_of(*token_lists)
    seen = [tuple(pack.token_ids[ancestors(pack, position)].tolist()) for position in range(len(pack.token_ids))]
    assert len(seen) == len(prefixes)
    assert set(seen) == prefixes
    assert pack.depths.tolist() == [len(prefix) - 1 for prefix in seen]


@pytest.mark.slow
@given(sample_lists(), st.integers(1, 40), st.booleans())
def test_packs_keep_the_budget_and_hold_each_sample_once(samples: list[Sample], budget: int, share: bool) -> None:
    packs = pack_samples(samples, budget=budget, share=share)
    assert sorted(each.trajectory_id for pack in packs for each in pack.samples) == sorted(
        each.trajectory_id for each in samples
    )
    for pack in packs:
        assert len(pack.token_ids) <= budget or len(pack.samples) == 1


def test_a_tree_is_cut_where_that_repeats_least() -> None:
    """Two prompts of 10 with 4 answers of 5 each are 2 * (10 + 20) = 60 tokens; 30 fit: cut between the prompts."""
    samples = [sample([prompt] * 10 + [answer] * 5) for prompt in (1, 2) for answer in (3, 4, 5, 6)]
    assert [len(pack.token_ids) for pack in pack_samples(samples, budget=30)] == [30, 30]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7), st.integers(6, 12))
def test_no_other_cut_of_the_sorted_samples_costs_less(token_lists: list[list[int]], budget: int) -> None:
    """Against all ways to cut at most 7 samples; the cost is tokens, and PACK_COST for each pack."""
    packs = pack_samples([sample(ids) for ids in token_lists], budget=budget)
    ordered = [each.token_ids.tolist() for pack in packs for each in pack.samples]

    def tokens(run: list[list[int]]) -> int:
        return len({tuple(ids[:length]) for ids in run for length in range(1, len(ids) + 1)})

    def least(start: int) -> float:
        if start == len(ordered):
            return 0
        ends = range(start + 1, len(ordered) + 1)
        sizes = {end: tokens(ordered[start:end]) for end in ends}
        return min(sizes[end] + PACK_COST + least(end) for end in ends if sizes[end] <= budget)

    assert sum(len(pack.token_ids) + PACK_COST for pack in packs) == least(0)


def test_rows_share_nothing() -> None:
    [pack] = pack_samples([sample([1, 2, 3]), sample([1, 2, 4])], budget=100, share=False)
    assert pack.token_ids.tolist() == [1, 2, 3, 1, 2, 4]
    assert pack.segments.parents == [-1, -1]


@pytest.mark.slow
@given(sample_lists(), st.randoms(use_true_random=False), st.integers(5, 40))
def test_the_order_of_the_samples_does_not_matter(samples: list[Sample], random: object, budget: int) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ours, theirs = pack_samples(samples, budget=budget), pack_samples(shuffled, budget=budget)
    assert [pack.token_ids.tolist() for pack in ours] == [pack.token_ids.tolist() for pack in theirs]


def test_no_samples_no_packs() -> None:
    assert pack_samples([], budget=10) == []


def test_packs_are_small_unless_that_cuts_trees() -> None:
    """Four attempts at each of two prompts, 5 tokens each, budgets 32 to 128.

    Prompts of 10 make trees of 30 tokens: one to a pack of 32. Prompts of 60 make trees of 80: cut at 64 they are 65
    tokens an attempt, 520 in all, against 160 at 128.
    """
    for prompt, trees in ((10, [30, 30]), (60, [80, 80])):
        samples = [sample([group] * prompt + [9 + attempt] * 5) for group in range(2) for attempt in range(4)]
        packs = pack_small(samples, budgets=[32, 64, 128])
        assert [len(pack.token_ids) for pack in packs] == trees


def test_a_tree_of_samples_that_share_nothing_is_rows() -> None:
    """Token for token and segment for segment: where trees cannot pay they cost nothing."""
    samples = [sample([index] * (5 + index)) for index in range(6)]
    [tree], [rows] = (pack_samples(samples, budget=100, share=share) for share in (True, False))
    assert tree.segments == rows.segments
    assert tree.token_ids.tolist() == rows.token_ids.tolist()


@given(sequences)
def test_reuse_is_rows_tokens_for_each_of_one_tree(token_lists: list[list[int]]) -> None:
    flat = sum(map(len, token_lists))
    distinct = {tuple(ids[:end]) for ids in token_lists for end in range(1, len(ids) + 1)}
    assert reuse([sample(ids) for ids in token_lists]) == flat / len(distinct)


def test_no_samples_reuse_nothing() -> None:
    assert reuse([]) == 0
