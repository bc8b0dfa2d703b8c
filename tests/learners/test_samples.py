"""Samples: the leaves of a trajectory's tree of turns, each sampled token trained once."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.schema import GrpoConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.learners.samples import Sample
from art_cli.learners.torch_learner import TorchLearner
from art_cli.runs.trajectory import Turn, sequence
from art_cli.runtime.errors import LearnerError
from tests.support.models.tiny import tiny_weights
from tests.support.records import trees
from tests.support.records.trees import scored, turn, turn_trees


def samples_of(*turns: Turn) -> list[Sample]:
    return trees.samples_of(scored(turns, 1.0), 0.5)


def as_lists(samples: list[Sample]) -> list[tuple[list[int], list[int]]]:
    return [(sample.token_ids.tolist(), sample.targets.tolist()) for sample in samples]


def test_one_turn_is_one_sample() -> None:
    [sample] = samples_of(turn([1, 2, 3], [4, 5], logprobs=[-0.1, -0.7], raw_logprobs=[-0.2, -0.9], temperature=0.5))
    assert as_lists([sample]) == [([1, 2, 3, 4, 5], [3, 4])]
    assert sample.logprobs.tolist() == [-0.1, -0.7]
    assert sample.raw_logprobs.tolist() == [-0.2, -0.9]
    assert sample.temperatures.tolist() == [0.5, 0.5]
    assert (sample.advantages.tolist(), sample.trajectory_id, sample.turn) == ([0.5, 0.5], "g/0", 0)


def test_a_turn_that_continues_another_is_one_sample_with_it() -> None:
    """1 2 3 [4 5] 6 [7], each turn at its own temperature."""
    [sample] = samples_of(turn([1, 2, 3], [4, 5]), turn([6], [7], parent=0, kept=5, temperature=0.5))
    assert as_lists([sample]) == [([1, 2, 3, 4, 5, 6, 7], [3, 4, 6])]
    assert sample.temperatures.tolist() == [1.0, 1.0, 0.5]


def test_a_token_that_two_leaves_share_is_trained_in_the_first() -> None:
    """1 2 3 [4 5] 6 [7] and 1 2 3 [4] 8 [9]: the 4 belongs to both."""
    first, second = samples_of(
        turn([1, 2, 3], [4, 5]), turn([6], [7], parent=0, kept=5), turn([8], [9], parent=1, kept=4)
    )
    assert as_lists([first, second]) == [([1, 2, 3, 4, 5, 6, 7], [3, 4, 6]), ([1, 2, 3, 4, 8, 9], [5])]


def test_the_same_tokens_sampled_twice_are_trained_twice() -> None:
    """Two calls with the same prompt that drew the same answer are two draws, not one."""
    assert as_lists(samples_of(turn([1], [2]), turn([1], [2]))) == [([1, 2], [1]), ([1, 2], [1])]


def test_a_turn_that_sampled_nothing_gives_no_sample_of_its_own() -> None:
    assert samples_of() == []
    assert samples_of(turn([1, 2], [])) == []
    assert as_lists(samples_of(turn([1, 2], [3]), turn([4], [], parent=0, kept=3))) == [([1, 2, 3, 4], [2])]


def test_logprobs_of_a_cut_distribution_are_not_comparable() -> None:
    """Greedy is trained at temperature 1: nothing can be divided by 0."""
    [top] = samples_of(turn([1], [2], logprobs=[-0.1], raw_logprobs=[-0.3], top_k=5, temperature=0.7))
    [greedy] = samples_of(turn([1], [2], logprobs=[0.0], raw_logprobs=None, temperature=0.0))
    assert np.isnan(top.logprobs).all() and top.raw_logprobs.tolist() == [-0.3] and top.temperatures.tolist() == [0.7]
    assert np.isnan(greedy.logprobs).all() and np.isnan(greedy.raw_logprobs).all()
    assert greedy.temperatures.tolist() == [1.0]


def test_logprobs_under_a_grammars_mask_are_unknown_to_the_learner() -> None:
    plain, masked = [
        samples_of(turn([1], [2], logprobs=[-0.1], raw_logprobs=[-0.3], is_masked=it)) for it in (False, True)
    ]
    assert plain[0].logprobs.tolist() == [-0.1]
    assert np.isnan(masked[0].logprobs).all() and masked[0].raw_logprobs.tolist() == [-0.3]


@given(st.integers(1, 6).flatmap(turn_trees))
def test_every_sampled_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    """Told apart by their logprobs, which are minus the token's own number here; each sample is a turn's sequence."""
    number = 0
    numbered = []
    for each in turns:
        values = [-float(number + offset) for offset in range(len(each.sampled_ids))]
        number += len(values)
        fields = {name: getattr(each, name) for name in Turn.__struct_fields__}
        numbered.append(Turn(**fields | {"logprobs": values, "raw_logprobs": values}))
    samples = samples_of(*numbered)
    trained = sorted((value for sample in samples for value in sample.logprobs), reverse=True)
    # the very first token of a sequence has nothing that predicts it
    predicted = [
        value
        for index, each in enumerate(numbered)
        for offset, value in enumerate(each.logprobs)
        if len(sequence(numbered, index)) - len(each.sampled_ids) + offset > 0
    ]
    assert trained == predicted
    for sample in samples:
        assert sample.token_ids.tolist() == sequence(numbered, sample.turn)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-1.0]}, "2 sampled tokens but 1 logprobs"),
        ({"raw_logprobs": [-1.0, float("inf")]}, "raw_logprobs that are not finite"),
        ({"logprobs": [-1.0, float("nan")]}, "logprobs that are not finite"),
        ({"logprobs": [0.9, -1.0]}, "logprobs of up to 0.9, and a logprob is at most 0; leave the trajectory out"),
        ({"raw_logprobs": [-1.0, 2e-6]}, "raw_logprobs of up to 2e-06, and a logprob is at most 0"),
    ],
)
def test_refuses_logprobs_that_cannot_be_the_engines(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LearnerError, match=f"trajectory g/0, turn 0: {message}"):
        samples_of(turn([1], [2, 3], **fields))


def test_rounding_may_raise_a_logprob_slightly_above_0() -> None:
    [sample] = samples_of(turn([1], [2], logprobs=[5e-7], raw_logprobs=[5e-7]))
    assert sample.logprobs.tolist() == [5e-7]


@pytest.mark.parametrize("temperature", [-3.0, 1e-300, 9e-7, 1e300, float("nan")])
def test_a_turn_has_no_temperature_that_logits_cannot_be_divided_by(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature .* is neither 0 \(greedy\) nor in 1e-06 to "):
        turn([1], [2], temperature=temperature)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", [-1]),
        ("sampled_ids", [10**20]),
        ("sampled_ids", [5000]),
        ("sampled_ids", [7] * 3000),
    ],
)
def test_a_step_from_another_tools_file_names_the_turn_that_the_model_cannot_have(field: str, value: Any) -> None:
    """The model has a vocabulary below 5,000 and a context below 3,000 tokens. No weight is changed."""
    weights = tiny_weights()
    learner = TorchLearner(
        weights, LearnerSetup(train=TrainConfig(learning_rate=1e-3), loss=GrpoConfig(), learner=TorchLearnerConfig())
    )
    before = {name: tensor.clone() for name, tensor in learner.parameters.items()}
    good = turn([1, 2], [3, 4])
    fields = {field: value} | (
        {"logprobs": [-1.0] * len(value), "raw_logprobs": None} if field == "sampled_ids" else {}
    )
    odd = msgspec.structs.replace(good, **fields)
    groups = [[scored([good], 0.0, index=0), scored([odd], 1.0, index=1)]]
    with pytest.raises(LearnerError, match=r"trajectory .*, turn 0: "):
        learner.step(groups)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.parameters.items())


@pytest.mark.parametrize("kept", [-1, 5])
def test_a_turn_keeps_no_more_tokens_than_are_before_it(kept: int) -> None:
    turns = [turn([1, 2], [3, 4]), msgspec.structs.replace(turn([5], [6]), parent=0, kept=kept)]
    with pytest.raises(LearnerError, match=f"turn 1: it keeps {kept} tokens of the 4 before it"):
        samples_of(*turns)
