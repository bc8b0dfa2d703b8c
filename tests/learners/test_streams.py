"""Components of the loss: weights per token, each component divided by its own count over the whole optimizer step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_cli.config.schema import AlgorithmConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.samples import Credit, Row, token_weights
from art_cli.learners.step.step_samples import count, make_step_samples
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import ScoredTrajectory, sequence
from art_cli.runtime.errors import LearnerError
from tests.support.models.gradients import Caught, distance, groups_of, in_float64, learner
from tests.support.models.streams import weight
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import logprobs_of, sampled, samples_of, scored, turn

WEIGHTS = tiny_weights(seed=3)
STREAMS = "tests.support.models.streams:Streams"
NAMES = ["policy", "cross_entropy", "reference_kl"]
Token = tuple[int, int]  # turn, and place among the tokens that it adds


def tokens_of(trajectory: ScoredTrajectory, index: int) -> list[Token]:
    """Which token each one of a turn's whole sequence is."""
    t = trajectory.turns[index]
    kept = tokens_of(trajectory, t.parent)[: t.kept] if t.parent is not None else []
    return [*kept, *((index, place) for place in range(len(t.prompt_ids) + len(t.sampled_ids)))]


@in_float64
def reference_gradient(
    weights: Weights, groups: list[list[ScoredTrajectory]], components: list[str]
) -> dict[str, torch.Tensor]:
    """Token by token, in the first turn whose sequence holds it after its first place; no packing, no shared code."""
    sums = dict.fromkeys(components, torch.zeros(()))
    counts = dict.fromkeys(components, 0)
    for trajectory in (trajectory for group in groups for trajectory in group):
        done = set[Token]()
        for index in range(len(trajectory.turns)):
            ids, tokens = sequence(trajectory.turns, index), tokens_of(trajectory, index)
            for at in range(1, len(ids)):
                if tokens[at] in done:
                    continue
                done.add(tokens[at])
                owner, place = tokens[at]
                t = trajectory.turns[owner]
                offset = place - len(t.prompt_ids)
                new = logprobs_of(weights, ids, t.temperature if offset >= 0 else 1.0)[at - 1]
                for name in components:
                    value = weight(name, trajectory.index, place, offset >= 0)
                    if math.isnan(value):
                        continue
                    counts[name] += 1
                    if name == "policy":
                        ratio = (new - t.logprobs[offset]).exp()
                        loss = -torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value)
                    elif name == "cross_entropy":
                        loss = -value * new
                    else:
                        with torch.no_grad(), weights.adapter_off():
                            gap = logprobs_of(weights, ids, t.temperature)[at - 1]
                        loss = value * ((gap - new).exp() - (gap - new) - 1)
                    sums[name] = sums[name] + loss
    weights.model.zero_grad()
    total = sum((sums[name] / counts[name] for name in components if counts[name]), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    gradient = {n: p.grad.clone() for n, p in weights.model.named_parameters() if p.grad is not None}
    weights.model.zero_grad()
    return gradient


@pytest.mark.slow
@pytest.mark.parametrize("components", [*([name] for name in NAMES), NAMES], ids="+".join)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(groups=groups_of(), budget=st.sampled_from([1, 12, 24, 4096]), packing=st.sampled_from(["auto", "tree", "rows"]))
def test_gradient_is_that_of_one_token_at_a_time(
    components: list[str], groups: list[list[ScoredTrajectory]], budget: int, packing: str
) -> None:
    """Contract 1, for each component alone and for all of them together, mixed within one trajectory."""
    for trajectory in (trajectory for group in groups for trajectory in group):
        trajectory.turns = sampled(WEIGHTS, trajectory.turns, noise=0.1, seed=trajectory.index)
    expected = reference_gradient(WEIGHTS, groups, components)
    loss = AlgorithmConfig(entry=STREAMS, options={"components": components}, mean_over="trained")
    caught = Caught(learner(WEIGHTS, loss, micro_batch_tokens=budget, packing=packing, max_grad_norm=1e9))
    caught.learner.step(groups)
    assert distance(caught.gradient, expected, floor=1e-3) <= 1e-5


# --- weights ----------------------------------------------------------------------------------------------------------

nan = math.nan
TALK = scored([turn([1, 2], [3, 4]), turn([5], [6], parent=0, kept=4)], 1.0)  # 1 2 [3 4] 5 [6]


def test_a_number_is_a_policy_weight_of_every_sampled_token() -> None:
    expected = [[nan, nan, 0.5, 0.5, nan, 0.5], *[[nan] * 6] * 4]
    np.testing.assert_equal(token_weights(TALK, 0.5), expected)
    np.testing.assert_equal(token_weights(TALK, Credit(policy=0.5)), expected)


def test_tokens_of_a_tools_answer_are_trained_beside_those_that_were_sampled() -> None:
    """The 5 between the turns at 0.1. Nothing predicts the first token of a sequence: it is not trained."""
    credit = Credit(policy=1.0, cross_entropy=[[9.0, nan, nan, nan], [0.1, nan]])
    [sample] = samples_of(TALK, credit)
    assert sample.targets.tolist() == [2, 3, 4, 5]
    np.testing.assert_equal(sample.weights[Row.POLICY], [1, 1, nan, 1])
    np.testing.assert_equal(sample.weights[Row.CROSS_ENTROPY], [nan, nan, 0.1, nan])
    assert [counts[:3] for counts in count([sample])] == [(3, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (Credit(policy=[[nan, 1.0, 1.0, 1.0], [nan, 1.0]]), "policy weights for tokens of a prompt"),
        (Credit(cross_entropy=[[1.0], [1.0]]), r"cross_entropy needs a weight per token of each turn: \[4, 2\]"),
        (Credit(cross_entropy=[1.0, 1.0]), r"cross_entropy needs a weight per token of each turn: \[4, 2\]"),
        (Credit(cross_entropy="half"), "cross_entropy: could not convert string to float: 'h'"),  # type: ignore[arg-type]
        (Credit(reference_kl=math.inf), "a weight in reference_kl is infinite"),
    ],
)
def test_weights_that_cannot_be_used_name_their_trajectory(credit: Credit, message: str) -> None:
    with pytest.raises(LearnerError, match=f"trajectory g/0: {message}"):
        token_weights(TALK, credit)


class Fixed(Algorithm):
    def __init__(self, *credits: Credit | float | None) -> None:
        self.credits = credits

    def credit(self, group: object) -> tuple[Credit | float | None, ...]:
        return self.credits


def test_a_component_without_signal_in_a_group_is_left_out_there() -> None:
    """Policy weights all zero, cross entropy not: the group is imitated, and counts as one without signal."""
    group = [scored([turn([1, 2], [3])], 1.0, index=index) for index in range(2)]
    imitated = Credit(policy=0.0, cross_entropy=0.5)
    batch = make_step_samples([group], Fixed(imitated, imitated), kl=0.1)
    assert [counts[:3] for counts in count(batch.groups[0])] == [(0, 0, 0), (2, 2, 2), (0, 0, 0), (0, 0, 0)]
    assert batch.no_signal_share == 1.0
    assert make_step_samples([group], Fixed(0.0, 0.0), kl=0.1).groups == []


def test_the_weight_of_the_kl_is_that_of_the_section_where_the_credit_says_none() -> None:
    group = [scored([turn([1, 2], [3])], 1.0, index=index) for index in range(3)]
    batch = make_step_samples([group], Fixed(Credit(policy=1.0), Credit(policy=-1.0, reference_kl=0.7), None), kl=0.1)
    assert [sample.weights[Row.REFERENCE_KL].tolist() for sample in batch.groups[0]] == [[0.1], [0.7]]


def test_a_step_that_only_imitates_changes_weights_and_reports_no_clip() -> None:
    weights = tiny_weights()
    loss = AlgorithmConfig(entry=STREAMS, options={"components": ["cross_entropy"]})
    group = [scored([turn([1, 2, 3, 4], [5])], reward, index=index) for index, reward in enumerate((0.0, 1.0))]
    before = logprobs_of(weights, [1, 2, 3, 4])[1]
    metrics = learner(weights, loss, learning_rate=1e-2).step([group])
    assert logprobs_of(weights, [1, 2, 3, 4])[1] > before
    assert metrics.num_updates == 1 and metrics.tokens_trained == 2
    assert math.isnan(metrics.clip_fraction) and math.isnan(metrics.entropy)
