"""Advantages: closed forms worked out by hand, and what must hold for any group."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.learners.algorithms.credit import advantages
from art_cli.runs.trajectory import has_signal

rewards_G = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_reward_minus_mean() -> None:
    """Rewards 1, 2, 6: mean 3, so -2, -1, 3."""
    assert advantages([1.0, 2.0, 6.0], scale=False) == [-2.0, -1.0, 3.0]


def test_scaled_by_the_sample_standard_deviation() -> None:
    """Rewards 1, 2, 6: squares 4 + 1 + 9 = 14, over G - 1 = 2 is 7, so each is divided by sqrt 7."""
    assert advantages([1.0, 2.0, 6.0], scale=True) == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("rewards", [[], [5.0], [0.1, 0.1, 0.1], [1.0, 1.0 + 1e-8], [1 / 3] * 7])
def test_equal_rewards_leave_exactly_nothing(rewards: list[float], scale: bool) -> None:
    """Contract 4. 0.1 + 0.1 + 0.1 is 0.30000000000000004 in floating point: a residue of 1e-17 is no signal."""
    assert advantages(rewards, scale=scale) == [0.0] * len(rewards)
    assert not has_signal(rewards)


def test_rewards_further_apart_than_1e_8_are_signal() -> None:
    assert has_signal([1.0, 1.0 + 2e-8])


@given(rewards_G, st.booleans())
def test_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], scale: bool) -> None:
    values = advantages(rewards, scale=scale)
    assert math.fsum(values) == pytest.approx(0, abs=1e-9 * max(1, *map(abs, values)) * len(values))
    pairs = sorted(zip(rewards, values, strict=True))
    assert [value for _, value in pairs] == sorted(values)


@given(rewards_G, st.floats(0.1, 10), st.floats(-10, 10))
def test_scaled_advantages_do_not_depend_on_the_rewards_unit(rewards: list[float], unit: float, shift: float) -> None:
    if max(rewards) - min(rewards) < 1e-3:
        return
    changed = [unit * reward + shift for reward in rewards]
    assert advantages(changed, scale=True) == pytest.approx(advantages(rewards, scale=True), abs=1e-6)


def test_refuses_rewards_that_are_not_finite() -> None:
    with pytest.raises(AssertionError, match="finite"):
        advantages([1.0, math.nan], scale=True)
