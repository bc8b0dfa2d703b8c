"""The choice of pairs, and the accuracy from the labels: against simulation, and at the ends."""

import numpy as np
import pytest

from art_cli.judges.pair_choice import PILOT, Strata, credit
from benchmarks.judges.label import label, simulate, strata_of


@pytest.mark.parametrize(
    ("difference", "verdict", "expected"),
    [(0.3, 1, 1.0), (-0.3, -1, 1.0), (0.3, -1, 0.0), (0.3, 0, 0.5), (0.0, 1, 0.5), (0.0, 0, 1.0), (1e-9, 0, 1.0)],
)
def test_a_credit_is_one_for_the_same_order_and_a_half_where_one_side_finds_no_difference(
    difference: float, verdict: int, expected: float
) -> None:
    assert credit(difference, verdict) == expected


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["steep", "verdict", "flat"])
def test_the_interval_holds_the_accuracy_of_all_pairs_at_the_moment_that_it_is_enough(judge: str) -> None:
    """Of 30 seeded files at least 26; benchmarks/judges/label.py measures the share over 300."""
    found = []
    for seed in range(30):
        file = simulate(judge, np.random.default_rng(seed))
        found.append(label(file, strata_of(file, is_chosen=True), np.random.default_rng(1000 + seed)))
    assert sum(each.is_covered for each in found) >= 26
    assert abs(np.mean([each.error for each in found])) < 0.02


def fed(margins: list[float], credits: list[float]) -> Strata:
    """Strata of these pairs, all labelled."""
    strata = Strata(np.array(margins), np.zeros(len(margins), bool))
    strata.count((int(strata.of[pair]), value) for pair, value in enumerate(credits))
    return strata


def test_with_all_labels_the_accuracy_is_their_mean_and_has_no_width() -> None:
    credits = [1.0, 0.0, 0.5, 1.0] * 10
    strata = fed([0.1 * (each % 7) for each in range(40)], credits)
    assert strata.accuracy() == pytest.approx((0.625, 0.625, 0.625))
    assert strata.num_needed() == 0 and strata.choose(strata.sizes - strata.nums) is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_labels_that_are_all_alike_leave_an_interval_that_a_few_of_them_cannot_close(value: float) -> None:
    strata = Strata(np.linspace(0.01, 1, 2000), np.arange(2000) % 2 == 0)
    for num in range(200):
        stratum = strata.choose(strata.sizes - strata.nums)
        assert stratum is not None
        strata.add(stratum, value, 0.0)
        found = strata.accuracy()
        assert 0 <= found.low < found.value < found.high <= 1 and (num > 12 or strata.num_needed() > 0)
    assert abs(found.value - value) < 0.03 and found.high - found.low < 0.08


def test_later_labels_go_where_the_judge_is_uncertain() -> None:
    """Pairs of a small margin, one of five, are right by halves, and all others always."""
    strata = Strata(np.linspace(0.01, 1, 1000), np.zeros(1000, bool))
    nums = []
    for num in range(200):
        stratum = strata.choose(strata.sizes - strata.nums)
        assert stratum is not None
        nums.append(stratum)
        strata.add(stratum, float(num % 2) if stratum == 0 else 1.0, 0.0)
    assert nums[:PILOT].count(0) == PILOT // 5 and nums[PILOT:].count(0) > 0.3 * len(nums[PILOT:])


def test_equal_margins_everywhere_are_one_stratum_and_one_pair_is_enough_to_ask() -> None:
    assert Strata(np.zeros(5), np.zeros(5, bool)).sizes.tolist() == [5]
    assert Strata(np.full(5, 0.5), np.ones(5, bool)).sizes.tolist() == [5]
    assert fed([0.2], [1.0]).accuracy() == (1.0, 1.0, 1.0)
