"""Which groups of earlier steps are trained on again: the candidates and their probabilities by hand."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from art_cli.rollouts.adaptive import Replay, choose_replays
from art_cli.runs.trajectory import GroupRewards


def group(name: str, *rewards: float) -> GroupRewards:
    return GroupRewards(group_id=name, scenario=name, pool=name, rewards=list(rewards))


def test_only_groups_with_signal_within_the_age_are_candidates() -> None:
    history = {
        1: [group("too old", 0, 1)],
        2: [group("a", 0, 1), group("silent", 1, 1), group("failed")],
        4: [group("b", 0, 1), group("lone", 1)],
    }
    chosen = choose_replays(history, step=5, num=9, max_age=3, seed=0)
    assert sorted(chosen) == [Replay(2, "a"), Replay(4, "b")]
    assert choose_replays({}, step=0, num=9, max_age=3, seed=0) == []


def test_the_fresh_and_the_telling_are_likelier() -> None:
    """Weights: variance / age. a: 0.5 / 1, b: 0.5 / 2, c: 0.125 / 2 (rewards 0 and 0.5), so 8 : 4 : 1.

    3,000 seeds; each count within 5 standard deviations of its share.
    """
    history = {6: [group("b", 0, 1), group("c", 0, 0.5)], 7: [group("a", 0, 1)]}
    first = Counter(choose_replays(history, step=8, num=1, max_age=8, seed=seed)[0].group_id for seed in range(3000))
    for name, share in (("a", 8 / 13), ("b", 4 / 13), ("c", 1 / 13)):
        assert abs(first[name] - 3000 * share) < 5 * (3000 * share * (1 - share)) ** 0.5


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.lists(st.floats(-5, 5), max_size=3), max_size=4)),
    st.integers(0, 10),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_none_twice_none_too_old_and_the_same_for_the_same_files(
    rewards: dict[int, list[list[float]]], step: int, num: int, max_age: int
) -> None:
    history = {past: [group(f"s{past}-g{n}", *r) for n, r in enumerate(groups)] for past, groups in rewards.items()}
    chosen = choose_replays(history, step=step, num=num, max_age=max_age, seed=1)
    assert len(set(chosen)) == len(chosen) <= num
    assert all(step - max_age <= past < step for past, _ in chosen)
    again = dict(reversed(history.items()))
    assert choose_replays(again, step=step, num=num, max_age=max_age, seed=1) == chosen
