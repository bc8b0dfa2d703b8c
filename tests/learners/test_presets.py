"""Every preset: contracts 1 and 6 hold for each name; and what each one's credit is, by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.sections.loss_config import EXPERIMENTS
from art_cli.learners.algorithms.credit import over_shrunk_mean
from art_cli.learners.algorithms.presets import PRESETS, build_algorithm
from art_cli.learners.step.step_samples import make_step_samples
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError
from tests.support.models.gradients import Caught, distance, learner
from tests.support.models.preset_groups import config_of, made_groups
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import scored, turn

NAMES = sorted({*PRESETS, *EXPERIMENTS} - {"distill"})  # test_teachers.py holds the same of it, with a teacher
PACKINGS = [(24, "tree"), (4096, "rows")]  # micro_batch_tokens, packing
WEIGHTS = tiny_weights(seed=3)


GROUPS = made_groups(WEIGHTS)


def gradient(name: str, budget: int, packing: str) -> dict[str, torch.Tensor]:
    trained = learner(WEIGHTS, config_of(name, kl=0.1), micro_batch_tokens=budget, packing=packing, max_grad_norm=1e9)
    caught = Caught(trained)
    trained.step(GROUPS)
    return caught.gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_same_for_every_packing_and_micro_batch_size(name: str) -> None:
    """Contract 1, against one row at a time: equal to 1e-5 of the gradient's norm."""
    expected = gradient(name, 1, "rows")
    for budget, packing in PACKINGS:
        assert distance(gradient(name, budget, packing), expected) <= 1e-5, (budget, packing)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_the_next_step_is_bit_identical(name: str, tmp_path: Path) -> None:
    """Contract 6."""
    knobs = {"updates_per_step": 2, "weight_decay": 0.1}
    first, second = (learner(tiny_weights(seed=3), config_of(name, kl=0.1), **knobs) for _ in range(2))
    first.step(GROUPS)
    first.save(tmp_path)
    first.step(GROUPS)
    second.load(tmp_path)
    second.step(GROUPS)
    for parameter, tensor in first.parameters.items():
        assert torch.equal(tensor, second.parameters[parameter]), parameter


# --- credit -----------------------------------------------------------------------------------------------------------


def played(*rewards: list[float], **metrics: list[list[float]]) -> list[list[ScoredTrajectory]]:
    """A group for each list of rewards, with the metrics given likewise."""
    return [
        [
            scored(
                [turn([1, 2], [3])],
                reward,
                index=index,
                group="abc"[which],
                metrics={name: values[which][index] for name, values in metrics.items()},
            )
            for index, reward in enumerate(of_group)
        ]
        for which, of_group in enumerate(rewards)
    ]


def credit_of(groups: list[list[ScoredTrajectory]], name: str, **knobs: Any) -> dict[str, float]:
    batch = make_step_samples(groups, build_algorithm(config_of(name, **knobs), max_tokens=10))
    return {sample.trajectory_id: float(sample.advantages[0]) for group in batch.groups for sample in group}


def test_maxrl_divides_by_the_mean_reward_so_that_a_rare_success_counts_more() -> None:
    """1 of 4: mean 1/4, so (1 - 1/4) / (1/4) = 3 and -1. 3 of 4: mean 3/4, so 1/3 and -1."""
    found = credit_of(played([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]), "maxrl")
    assert [found[f"a/{index}"] for index in range(4)] == pytest.approx([3, -1, -1, -1])
    assert [found[f"b/{index}"] for index in range(4)] == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert len(found) == 8  # a group whose mean is 0 is left out


def test_maxrl_refuses_a_negative_reward_and_names_its_trajectory() -> None:
    with pytest.raises(LearnerError, match="trajectory a/1: loss 'maxrl' needs rewards of at least 0, not -0.5"):
        credit_of(played([1.0, -0.5]), "maxrl")


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    """0, 1, 5: the others' means are 3, 2.5, 0.5."""
    found = credit_of(played([0.0, 1.0, 5.0], [2.0]), "rloo")
    assert found == pytest.approx({"a/0": -3.0, "a/1": -1.5, "a/2": 4.5})


def shrunk_of(*rewards: list[float]) -> dict[str, float]:
    return credit_of(played(*rewards), "grpo", baseline="shrunk")


def test_a_shrunk_baseline_lies_between_the_mean_of_the_group_and_of_the_step() -> None:
    """Equal groups: the step's mean. Groups that differ by far more than noise: the others of the group."""
    found = shrunk_of([0.0, 1.0], [0.0, 1.0])
    assert found == pytest.approx({"a/0": -0.5, "a/1": 0.5, "b/0": -0.5, "b/1": 0.5})
    far = shrunk_of([0.0, 1.0, 2.0], [1000.0, 1001.0, 1002.0])
    own = {f"{group}/{index}": value for group in "ab" for index, value in enumerate((-1.5, 0.0, 1.5))}
    assert all(far.get(name, 0.0) == pytest.approx(value, abs=0.01) for name, value in own.items())


def test_a_shrunk_baseline_gives_nothing_where_rewards_tell_nothing() -> None:
    assert shrunk_of([0.3, 0.3], [0.3, 0.3]) == {} and shrunk_of([1.0]) == {}
    assert shrunk_of([0.0, 1.0]) == pytest.approx({"a/0": -1.0, "a/1": 1.0})  # one group: the others in it


def test_with_a_shrunk_baseline_signal_is_still_what_differs_within_a_group() -> None:
    """Both groups are trained on; the bound on a step counts the one whose rewards differ."""
    algorithm = build_algorithm(config_of("grpo", baseline="shrunk"), max_tokens=10)
    batch = make_step_samples(played([0.0, 0.0], [0.0, 1.0]), algorithm)
    assert (len(batch.groups), batch.num_with_signal, batch.no_signal_share) == (2, 1, 0.5)


def test_a_shrunk_baseline_compares_a_group_of_equal_rewards_with_the_other_groups() -> None:
    """0.3 twice, beside 1 twice and 0, 1: the mean of the other four is 0.75, and 0.4 for the second group."""
    # s = 1 / 4, t = 1 / 8 - s / 2 = 0
    assert shrunk_of([0.0, 0.0], [0.0, 1.0]) == pytest.approx({"a/0": -0.5, "a/1": -0.5, "b/0": 0.0, "b/1": 1.0})
    apart = {"a/0": -0.6, "a/1": -0.6, "b/0": 0.6, "b/1": 0.6}
    assert shrunk_of([0.1, 0.1], [0.7, 0.7]) == pytest.approx(apart)  # no group has signal
    settled, best, mixed = over_shrunk_mean([[0.3, 0.3], [1.0, 1.0], [0.0, 1.0]])
    assert settled == pytest.approx([0.3 - 0.75] * 2)
    assert best == pytest.approx([1.0 - 0.4] * 2)
    assert mixed[0] < 0 < mixed[1]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5), min_size=2, max_size=5))
def test_a_shrunk_baseline_is_a_mean_of_rewards(rewards: list[list[float]]) -> None:
    found = over_shrunk_mean(rewards)
    low, high = min(map(min, rewards)), max(map(max, rewards))
    for group, values in zip(rewards, found, strict=True):
        for reward, value in zip(group, values, strict=True):
            assert low - 1e-9 <= reward - value <= high + 1e-9


def test_reinforce_plus_plus_normalizes_over_the_step() -> None:
    """0, 1 and 3, 4: mean 2, squares 4 + 1 + 1 + 4 = 10 over 3. A group of equal rewards counts as its distance."""
    found = credit_of(played([0.0, 1.0], [3.0, 4.0]), "reinforce++")
    std = (10 / 3) ** 0.5
    assert found == pytest.approx({"a/0": -2 / std, "a/1": -1 / std, "b/0": 1 / std, "b/1": 2 / std})
    assert credit_of(played([1.0, 1.0], [3.0, 3.0]), "reinforce++").keys() == {"a/0", "a/1", "b/0", "b/1"}
    assert credit_of(played([1.0, 1.0], [1.0, 1.0]), "reinforce++") == {}


def test_reinforce_plus_plus_with_baseline_subtracts_the_groups_mean_first() -> None:
    """0, 1 and 3, 7, and 0.1 three times: differences -1/2, 1/2, -2, 2, 0, 0, 0; squares 8.5 over 6."""
    found = credit_of(played([0.0, 1.0], [3.0, 7.0], [0.1] * 3), "reinforce++", baseline=True)
    std = (8.5 / 6) ** 0.5
    assert found == pytest.approx({"a/0": -0.5 / std, "a/1": 0.5 / std, "b/0": -2 / std, "b/1": 2 / std})


PARTS = {"reward_parts": {"win": 1.0, "brevity": 0.2}}


def test_gdpo_normalizes_each_part_in_its_group_and_the_sum_over_the_step() -> None:
    """Group a: win 0, 1 -> -+1/sqrt 2; brevity 10, 30 -> -+1/sqrt 2. Sums -+1.2 / sqrt 2.

    Group b: win 1, 1 -> 0; brevity 2, 1 -> +-1/sqrt 2. Sums +-0.2 / sqrt 2. Group c says nothing. Over the step the
    squares are 2 * (1.2^2 + 0.2^2) / 2 = 1.48 over 5. The unit of brevity does not matter.
    """
    groups = played([0.0] * 2, [0.0] * 2, [0.0] * 2, win=[[0, 1], [1, 1], [1, 1]], brevity=[[10, 30], [2, 1], [5, 5]])
    std = (1.48 / 5) ** 0.5 * 2**0.5
    expected = {"a/0": -1.2 / std, "a/1": 1.2 / std, "b/0": 0.2 / std, "b/1": -0.2 / std}
    assert credit_of(groups, "gdpo", **PARTS) == pytest.approx(expected)


def test_gdpo_tells_rewards_apart_whose_sums_are_equal() -> None:
    """The judge's reward is a part named `reward`. Sums 1, 1, 0 of 0 + 1, 1 + 0, 0 + 0 differ once each part is scaled.

    reward 0, 1, 0 and win 1, 0, 0 by mirror give the first two the same value; at a weight of 2 they differ.
    """
    groups = played([0.0, 1.0, 0.0], win=[[1, 0, 0]])
    found = credit_of(groups, "gdpo", reward_parts={"reward": 2.0, "win": 1.0})
    assert found["a/1"] > found["a/0"] > found["a/2"]


def test_gdpo_gives_an_attempt_at_a_limit_the_limits_reward_as_each_part_that_it_lacks() -> None:
    groups = played([0.0, 1.0], win=[[0, 1]])
    first = groups[0][0]
    first.metrics, first.limit, first.returned_reward = {}, "turn_limit", -1.0
    assert credit_of(groups, "gdpo", reward_parts={"win": 1.0})["a/0"] < 0


def test_gdpo_names_the_trajectory_that_lacks_a_part() -> None:
    with pytest.raises(
        LearnerError, match="trajectory a/0: no metric 'brevity', which loss.reward_parts names; it has"
    ):
        credit_of(played([0.0, 1.0], win=[[0, 1]]), "gdpo", **PARTS)
    with pytest.raises(LearnerError, match="trajectory a/1: its metric 'brevity' is nan"):
        credit_of(played([0.0, 1.0], win=[[0, 1]], brevity=[[0, math.nan]]), "gdpo", **PARTS)
