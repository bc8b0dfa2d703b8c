"""Padding of packs: few sizes, and nothing that a sample can see."""

import numpy as np

from art_cli.learners.packs.packing import pack_samples, round_up
from art_cli.learners.packs.tree_attention import padded, padded_rows
from art_cli.learners.samples import Sample, bare_sample


def test_sizes_are_few_and_close() -> None:
    """Above 128 there are eight of them per doubling, each at most an eighth above what is asked for."""
    sizes = [round_up(num) for num in range(1, 4097)]
    assert all(num <= size < num + max(8, num / 8 + 1) for num, size in enumerate(sizes, 1))
    assert len({size for size in sizes if 1024 < size <= 2048}) == 8


def test_padding_is_a_tree_of_its_own() -> None:
    """No segment reaches into it, its own reaches nothing else, and what is trained stays where it is."""
    [pack] = pack_samples([_sample(1, 2, 3, 4, 5), _sample(1, 2, 6, 7)], budget=100)
    whole = padded(pack)
    num = len(pack.token_ids)
    assert len(whole.token_ids) == round_up(num)
    assert whole.token_ids[:num].tolist() == pack.token_ids.tolist()
    assert max(whole.segments.reaches[:-1]) == num
    assert (whole.segments.starts[-1], whole.segments.parents[-1]) == (num, -1)
    assert whole.edges is pack.edges
    assert padded(whole) is whole


def test_rows_keep_what_they_held() -> None:
    rows = np.arange(3, 200, 7)
    found = padded_rows(rows, 256)
    assert len(found) == round_up(len(rows))
    assert set(rows) <= set(found)
    assert (np.diff(found) > 0).all()
    assert padded_rows(np.arange(5), 5).tolist() == [0, 1, 2, 3, 4]


def _sample(*ids: int) -> Sample:
    return bare_sample(np.array(ids, dtype=np.int64), np.arange(1, len(ids)), "one")
