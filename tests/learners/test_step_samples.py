"""A batch: which trajectories become samples, with which advantage, in which order."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings

from art_cli.config.schema import DapoConfig, DrGrpoConfig, GrpoConfig, LossConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.credit import rewards_of
from art_cli.learners.algorithms.gigpo import GigpoConfig
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.samples import count_sampled
from art_cli.learners.step.step_samples import count, make_step_samples, split_by_update
from art_cli.runs.trajectory import ScoredTrajectory, Turn
from tests.support.records.trees import samples_of, scored, turn, turn_trees


def answers(*rewards: float, lengths: list[int] | None = None, group: str = "g") -> list[ScoredTrajectory]:
    sizes = lengths or [1] * len(rewards)
    return [
        scored(
            [turn([1, 2], [3 + index] * size, finish_reason="length" if size >= 10 else "stop")],
            reward,
            index=index,
            group=group,
        )
        for index, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
    ]


def advantage_of(groups: list[list[ScoredTrajectory]], loss: LossConfig, max_tokens: int = 10) -> dict[str, float]:
    batch = make_step_samples(groups, build_algorithm(loss, max_tokens=max_tokens))
    found = {}
    for sample in (sample for group in batch.groups for sample in group):
        [found[sample.trajectory_id]] = set(sample.advantages.tolist())  # the same for each of its tokens
    return found


def test_advantages_are_of_each_group_apart() -> None:
    """Rewards 0, 1 and 5, 6: in both groups -1/2 and 1/2, over a deviation of sqrt(1/2)."""
    groups = [answers(0.0, 1.0, group="a"), answers(5.0, 6.0, group="b")]
    half = 0.5 / 0.5**0.5
    expected = {"a/0": -half, "a/1": half, "b/0": -half, "b/1": half}
    assert advantage_of(groups, GrpoConfig(scale_advantages=True)) == pytest.approx(expected)
    assert advantage_of(groups, GrpoConfig()) == advantage_of(groups, DrGrpoConfig(name="dr_grpo"))
    assert advantage_of(groups, DrGrpoConfig(name="dr_grpo"))["a/0"] == -0.5


class OverTheStep(Algorithm):
    """Reward minus the mean over all groups of the step."""

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> list[list[float | None]]:
        rewards = [rewards_of(group) for group in groups]
        mean = sum(map(sum, rewards)) / sum(map(len, rewards))
        return [[reward - mean for reward in of_group] for of_group in rewards]


def test_credit_over_the_whole_step_sees_every_group_that_has_a_finished_trajectory() -> None:
    """Rewards 0, 1 and 5, 6, and a group of failures: mean 3, so -3, -2, 2, 3. A group at the mean is left out."""
    failed = [scored([], None, index=index, error="error: x", group="c") for index in range(2)]
    groups = [answers(0.0, 1.0, group="a"), answers(3.0, 3.0, group="b"), failed, answers(5.0, 6.0, group="d")]
    batch = make_step_samples(groups, OverTheStep())
    found = {sample.trajectory_id: sample.advantages.tolist() for group in batch.groups for sample in group}
    assert found == {"a/0": [-3.0], "a/1": [-2.0], "d/0": [2.0], "d/1": [3.0]}
    assert (batch.num_with_signal, batch.num_groups) == (2, 4)


def test_does_not_depend_on_which_trajectory_finished_first() -> None:
    group = answers(0.0, 1.0, 3.0)
    batches = [
        make_step_samples([order], build_algorithm(GrpoConfig(), max_tokens=10)) for order in (group, group[::-1])
    ]
    ids = [[sample.trajectory_id for sample in batch.groups[0]] for batch in batches]
    assert ids[0] == ids[1] == ["g/0", "g/1", "g/2"]


def test_rewards_are_reported_as_they_were_given() -> None:
    """0, 1, 5: mean 2, squares 4 + 1 + 9 over three; a penalty that the loss adds is not in it."""
    loss = DapoConfig(name="dapo", overlong="penalty", overlong_buffer=10)
    batch = make_step_samples([answers(0.0, 1.0, 5.0)], build_algorithm(loss, max_tokens=2))
    assert (batch.reward_mean, batch.reward_std) == (2.0, pytest.approx(math.sqrt(14 / 3)))


def test_dapo_punishes_a_reply_near_the_limit_before_advantages() -> None:
    """Limit 10, buffer 4: 8 tokens lose (8 - 6) / 4 = 1/2. Rewards 1 and 1 become 1 and 1/2: advantages +-1/4."""
    group = answers(1.0, 1.0, lengths=[6, 8])
    config = {"name": "dapo", "scale_advantages": False, "overlong_buffer": 4}
    assert advantage_of([group], DapoConfig(**config, overlong="penalty")) == {"g/0": 0.25, "g/1": -0.25}
    assert advantage_of([group], DapoConfig(**config, overlong="keep")) == {}


def test_dapo_masks_a_reply_that_was_cut_off_and_keeps_it_in_the_mean() -> None:
    """Rewards 3, 0, 0, the last cut off: mean 1, so 2 and -1 for the other two."""
    group = answers(3.0, 0.0, 0.0, lengths=[1, 1, 10])
    config = {"name": "dapo", "scale_advantages": False}
    assert advantage_of([group], DapoConfig(**config, overlong="mask")) == {"g/0": 2.0, "g/1": -1.0}
    assert advantage_of([group], DapoConfig(**config, overlong="keep"))["g/2"] == -1.0


def test_a_group_of_failures_or_of_one_has_no_signal() -> None:
    failed = [scored([], None, index=index, error="error: x") for index in range(2)]
    batch = make_step_samples(
        [failed, [*failed[:1], *answers(1.0, 2.0)[1:]]], build_algorithm(GrpoConfig(), max_tokens=10)
    )
    assert (batch.groups, batch.no_signal_share, batch.num_failed, batch.reward_mean) == ([], 1.0, 3, 2.0)


@pytest.mark.parametrize(("num_groups", "parts", "sizes"), [(5, 2, [2, 3]), (2, 4, [1, 1]), (3, 1, [3]), (0, 3, [])])
def test_groups_are_dealt_out_whole_and_evenly(num_groups: int, parts: int, sizes: list[int]) -> None:
    batch = make_step_samples(
        [answers(0.0, 1.0, group=str(index)) for index in range(num_groups)],
        build_algorithm(GrpoConfig(), max_tokens=10),
    )
    dealt = split_by_update(batch.groups, parts)
    assert [len(samples) // 2 for samples in dealt] == sizes
    assert [sample for samples in dealt for sample in samples] == [s for group in batch.groups for s in group]


def test_counts_are_of_tokens_samples_and_trajectories() -> None:
    """A trajectory of two branches is two samples."""
    branched = scored([turn([1], [2, 3]), turn([4], [5], parent=0, kept=2)], 1.0)
    [group] = make_step_samples(
        [[branched, *answers(0.0, 0.0)[1:]]], build_algorithm(GrpoConfig(), max_tokens=10)
    ).groups
    assert [counts[:3] for counts in count(group)] == [(4, 3, 2), (0, 0, 0), (0, 0, 0), (0, 0, 0)]


def test_the_steps_finished_trajectories_are_counted_with_and_without_signal() -> None:
    """Groups: 1 + 2 tokens with signal, a branched one of 3 in 2 samples with the same reward as one of 1, a failure.

    An update of two has half of it, in the components of the policy.
    """
    branched = scored([turn([1], [2, 3]), turn([4], [5], parent=0, kept=2)], 1.0, group="b")
    failed = scored([turn([1], [2])], None, index=2, group="b", error="error: x")
    groups = [answers(0.0, 1.0, lengths=[1, 2]), [branched, *answers(0.0, 1.0, group="b")[1:], failed]]
    batch = make_step_samples(groups, build_algorithm(GrpoConfig(), max_tokens=10))
    assert len(batch.groups) == 1
    assert batch.finished == (7, 5, 4)
    policy, imitated, near, _ = count(batch.groups[0], batch.finished.divided(2))
    assert policy == (3, 2, 2, (3.5, 2.5, 2.0))
    assert (imitated.all, near.all) == ((0, 0, 0), (3.5, 2.5, 2.0))


@settings(max_examples=50)
@given(turns=turn_trees(5))
def test_what_could_be_trained_is_what_a_weight_for_every_sampled_token_trains(turns: list[Turn]) -> None:
    trajectory = scored(turns, 1.0)
    samples = samples_of(trajectory, 1.0)
    assert count_sampled(trajectory) == (sum(len(sample.targets) for sample in samples), len(samples))


def test_the_share_of_replies_in_shared_states_is_reported_where_states_are_compared() -> None:
    """Two groups of two answers to the same prompt, of which one answer goes on alone: 4 of 5 replies."""
    longer = scored([turn([1, 2], [3]), turn([4], [5], parent=0, kept=3)], 1.0, group="b")
    groups = [answers(0.0, 1.0, group="a"), [longer, answers(0.0, 0.0, group="b")[1]]]
    gigpo = build_algorithm(GigpoConfig(name="gigpo"), max_tokens=10)
    assert make_step_samples(groups, gigpo).shared_states == 4 / 5
    assert math.isnan(make_step_samples([], gigpo).shared_states)
    assert math.isnan(make_step_samples(groups, build_algorithm(GrpoConfig(), max_tokens=10)).shared_states)
