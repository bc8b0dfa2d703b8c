"""Adaptive choice of scenarios: the estimates by hand, the frequencies of drawing, and that files decide alone."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.rollouts.adaptive import AdaptiveOrder, expected_signal, reward_scale, squared_deviations
from art_cli.runs.trajectory import GroupRewards


def group(pool: str, *rewards: float) -> GroupRewards:
    return GroupRewards(group_id=f"g-{pool}", scenario=pool, pool=pool, rewards=list(rewards))


def test_the_estimate_by_hand() -> None:
    """Prior 1/6 with weight 2. Seen one half-life ago, so that each counts half.

    solved: no deviation, 3 degrees: (2/6 + 0) / (2 + 1.5) = 0.0952
    half:   rewards 0 0 1 1: S = 4 * 0.25 = 1: (2/6 + 0.5) / 3.5 = 0.2381
    failed: no reward counts as one degree: (2/6) / 2.5 = 0.1333
    """
    history = {2: [group("solved", 1, 1, 1, 1), group("half", 0, 0, 1, 1), group("failed")]}
    found = expected_signal(history, step=12, half_life=10)
    assert found == pytest.approx({"solved": 2 / 6 / 3.5, "half": (2 / 6 + 0.5) / 3.5, "failed": 2 / 6 / 2.5})


def test_several_groups_of_a_pool_add_up_and_the_newer_ones_count_more() -> None:
    """Half-life 1: step 3 counts 1/2, step 2 counts 1/4, at step 4: S = 0.5 / 2 + 0, degrees 1 / 2 + 1 / 4."""
    history = {2: [group("a", 1, 1)], 3: [group("a", 0, 1)]}
    assert expected_signal(history, step=4, half_life=1) == {"a": pytest.approx((2 / 6 + 0.25) / 2.75)}


def test_a_pool_of_easy_and_hopeless_scenarios_has_no_signal_though_its_mean_is_a_half() -> None:
    """Deviations are from each group's own mean, because only those teach: 100 groups bring it near 0."""
    history = {0: [group("mixed", 1, 1, 1, 1), group("mixed", 0, 0, 0, 0)] * 50}
    assert expected_signal(history, step=0, half_life=8)["mixed"] == pytest.approx(2 / 6 / 302)


def test_a_success_rate_p_is_estimated_as_p_times_one_minus_p() -> None:
    """10,000 groups of 8 at p = 0.3: 0.21, within 5 standard errors of the mean variance, 5 * 0.0011."""
    draw = Random(1)
    groups = [group("a", *(float(draw.random() < 0.3) for _ in range(8))) for _ in range(10_000)]
    assert expected_signal({0: groups}, step=0, half_life=8)["a"] == pytest.approx(0.21, abs=0.0055)


@pytest.mark.parametrize(
    ("rewards", "scale"),
    [((0.2, 0.4), 1), ((), 1), ((0, 1), 1), ((-1, 1), 2), ((50, 60), 10), ((-3, -3), 1)],
)
def test_rewards_outside_of_0_and_1_are_measured_in_the_range_seen(rewards: tuple[float, ...], scale: float) -> None:
    history = {0: [group("a", *rewards)]}
    assert reward_scale(history) == scale
    if len(rewards) == 2:
        spread = (rewards[1] - rewards[0]) ** 2 / 2  # S of two rewards
        expected = (2 / 6 + spread / scale**2) / 3
        assert expected_signal(history, step=0, half_life=8)["a"] == pytest.approx(expected)


def test_the_probabilities_by_hand() -> None:
    """0.9 * signal / sum + 0.1 / 3; unseen pools have the prior's 1/6. Sum: 0.25 + 0.05 + 1/6 = 0.46667."""
    order = AdaptiveOrder(["a", "b", "c"], seed=0)
    found = order.probabilities({"a": 0.25, "b": 0.05})
    total = 0.25 + 0.05 + 1 / 6
    assert found == pytest.approx([0.9 * value / total + 0.1 / 3 for value in (0.25, 0.05, 1 / 6)])
    assert sum(found) == pytest.approx(1)


def test_scenarios_are_drawn_with_their_probabilities() -> None:
    """4,000 steps: how often each comes first, and second after the likeliest; within 5 standard deviations."""
    order = AdaptiveOrder(["a", "b", "c"], seed=3)
    history = {0: [group("a", 0, 0, 1, 1)] * 4 + [group("b", 1, 1, 1, 1)] * 4}
    p = order.probabilities(expected_signal(history, step=0, half_life=1e9))
    draws = [order.groups(step, 2, 0, {past: history[0] for past in (step,)}) for step in range(4000)]
    first = Counter(draw[0] for draw in draws)
    for place, share in enumerate(p):
        assert abs(first[place] - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5
    after_a = [draw[1] for draw in draws if draw[0] == 0]
    share = p[2] / (p[1] + p[2])
    assert abs(after_a.count(2) - len(after_a) * share) < 5 * (len(after_a) * share * (1 - share)) ** 0.5


def test_a_solved_scenario_comes_back_when_its_groups_are_old() -> None:
    history = {0: [group("solved", 1, 1, 1, 1, 1, 1, 1, 1)]}
    found = [expected_signal(history, step=step, half_life=8)["solved"] for step in (1, 8, 80)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(2 / 6 / (2 + 7 * 2 ** (-1 / 8)))
    assert found[-1] == pytest.approx(1 / 6, rel=0.01)


ids_strategy = st.lists(st.text(max_size=3), min_size=1, max_size=9, unique=True)
rewards_strategy = st.lists(st.floats(-10, 10), max_size=4)


@given(ids_strategy, st.integers(0, 3), st.integers(0, 50), st.integers(1, 12), st.integers(0, 5), st.data())
def test_a_step_is_a_pure_function_of_scenarios_seed_step_and_history(
    ids: list[str], seed: int, step: int, per_step: int, spare: int, data: st.DataObject
) -> None:
    """Property: the file's order does not matter, and nothing comes twice before everything came once."""
    seen = data.draw(st.lists(st.tuples(st.integers(0, 49), st.sampled_from(ids), rewards_strategy), max_size=8))
    history: dict[int, list[GroupRewards]] = {}
    for past, id, rewards in seen:
        history.setdefault(past, []).append(group(id, *rewards))
    drawn = [ids[place] for place in AdaptiveOrder(ids, seed=seed).groups(step, per_step, spare, history)]
    moved = data.draw(st.permutations(ids))
    later = dict(reversed(history.items()))
    assert [moved[place] for place in AdaptiveOrder(moved, seed=seed).groups(step, per_step, spare, later)] == drawn
    assert len(drawn) == per_step + spare
    for start in range(0, len(drawn), len(ids)):
        block = drawn[start : start + len(ids)]
        assert len(set(block)) == len(block)


def test_scenarios_of_a_pool_share_its_estimate() -> None:
    order = AdaptiveOrder(["a", "b", "c"], seed=0, pools=["easy", "easy", "hard"])
    found = order.probabilities({"easy": 0.0, "hard": 0.2})
    assert found == pytest.approx([0.1 / 3, 0.1 / 3, 0.9 + 0.1 / 3])


def test_deviations_of_less_than_two_rewards_are_none() -> None:
    assert squared_deviations([]) == squared_deviations([7.0]) == 0.0
    assert squared_deviations([1.0, 3.0]) == 2.0
