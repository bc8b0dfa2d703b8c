"""The learner as a whole. Contract 1: the gradient of a step is that of one sequence at a time."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_cli.config.schema import CispoConfig, DapoConfig, DrGrpoConfig, GrpoConfig, GspoConfig, LossConfig, RlooConfig
from art_cli.config.sections.loss_config import MeanOver
from art_cli.learners.algorithms.maxrl import MaxrlConfig
from art_cli.learners.torch_learner import TorchLearner
from art_cli.runs.trajectory import ScoredTrajectory, sequence
from art_cli.runtime.errors import DriftError, LearnerError
from tests.support.models.gradients import (
    Caught,
    chosen_logprobs,
    distance,
    groups_of,
    learner,
    leaves,
    reference_gradient,
    two_answers,
)
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import logprobs_of, sampled, scored, turn

LOSSES: dict[str, LossConfig] = {
    "grpo": GrpoConfig(),
    "grpo, kl and importance": GrpoConfig(kl=0.1, off_policy={"name": "truncate", "cap": 1.05}, scale_advantages=False),
    "dr_grpo": DrGrpoConfig(name="dr_grpo", kl=0.1),
    "dapo": DapoConfig(name="dapo"),
    "gspo": GspoConfig(name="gspo", kl=0.1, clip=0.02, clip_high=0.02),
    "cispo": CispoConfig(name="cispo", clip_high=0.05),
}


# --- contract 1 -------------------------------------------------------------------------------------------------------


WEIGHTS = tiny_weights(seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(groups=groups_of(), budget=st.sampled_from([1, 12, 24, 4096]), packing=st.sampled_from(["auto", "tree", "rows"]))
def test_gradient_is_that_of_one_sequence_at_a_time(
    loss: LossConfig, groups: list[list[ScoredTrajectory]], budget: int, packing: str
) -> None:
    """Contract 1, for every loss, any packing and micro-batch size: equal to 1e-5 of the gradient's norm."""
    for group in groups:
        for trajectory in group:
            trajectory.turns = sampled(WEIGHTS, trajectory.turns, noise=0.1, seed=trajectory.index)
    expected = reference_gradient(WEIGHTS, groups, loss)
    trained = learner(WEIGHTS, loss, micro_batch_tokens=budget, packing=packing, max_grad_norm=1e9)
    caught = Caught(trained)
    trained.step(groups)
    assert distance(caught.gradient, expected, floor=1e-3) <= 1e-5


# --- what a step does -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_step_makes_the_better_sample_likelier_and_the_worse_one_less(loss: LossConfig) -> None:
    """From ratio 1, every loss's first gradient is the plain policy gradient."""
    weights = tiny_weights()
    group = two_answers(weights)
    before = [sum(t.turns[0].logprobs) for t in group]
    learner(weights, loss).step([group])
    after = [sum(logprobs_of(weights, sequence(t.turns, 0))[2:].tolist()) for t in group]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_saved_and_loaded_the_next_step_is_bit_identical(tmp_path: Path) -> None:
    weights, other = tiny_weights(), tiny_weights()
    groups = [two_answers(weights, group="a"), two_answers(weights, bad=0.5, group="b")]
    knobs = {"warmup_steps": 4, "weight_decay": 0.1, "updates_per_step": 2, "max_kl": 1e-6, "clip_to_history": 0.5}
    first, second = (learner(w, GrpoConfig(), **knobs) for w in (weights, other))
    for _ in range(4):
        first.step(groups)
    first.save(tmp_path)
    one = first.step(groups)
    second.load(tmp_path)
    two = second.step(groups)
    assert one.grad_clip < one.grad_norm and one.update_kl > 0
    assert [(m.grad_clip, m.update_kl, m.loss) for m in (one, two)] == [(one.grad_clip, one.update_kl, one.loss)] * 2
    assert second.optimizer.counts == first.optimizer.counts
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


def test_with_the_optimizer_offloaded_the_steps_are_the_same(tmp_path: Path) -> None:
    """Bit by bit, and either goes on from what the other saved."""
    weights = [tiny_weights() for _ in range(3)]
    groups = [two_answers(weights[0], group="a"), two_answers(weights[0], bad=0.5, group="b")]
    knobs = {"weight_decay": 0.1, "updates_per_step": 2}
    here, there, after = (learner(w, offload_optimizer=on, **knobs) for w, on in zip(weights, (0, 1, 1), strict=True))
    here.step(groups)
    here.save(tmp_path)
    after.load(tmp_path)
    for trained in (here, there, there, after):
        trained.step(groups)
    for name, parameter in here.parameters.items():
        assert torch.equal(parameter, there.parameters[name]), name
        assert torch.equal(parameter, after.parameters[name]), name


@pytest.mark.parametrize("loss", [GspoConfig(name="gspo"), RlooConfig(name="rloo")], ids=lambda loss: loss.name)
def test_an_engines_rounding_clips_no_sample(loss: LossConfig) -> None:
    """0.1 nats on each of three tokens, away from the clip's middle: as ratios e^0.1 (gspo) and e^0.3 (rloo)."""
    weights = tiny_weights()
    group = two_answers(weights)
    for each, error in zip(group, (-0.1, 0.1), strict=True):
        [sampled_turn] = each.turns
        logprobs = [min(logprob + error, 0.0) for logprob in sampled_turn.logprobs]
        each.turns = [msgspec.structs.replace(sampled_turn, logprobs=logprobs)]
    metrics = learner(weights, loss, epochs_per_step=2, learning_rate=1e-6).step([group])
    assert (metrics.num_updates, metrics.clip_fraction) == (2, 0.0)


def parameters_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}


def assert_unchanged(learner: TorchLearner, before: dict[str, torch.Tensor]) -> None:
    for name, parameter in learner.parameters.items():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("rewards", [(0.1, 0.1), (1.0, 1.0 + 1e-9)])
def test_a_step_without_signal_changes_no_weight_and_says_so(rewards: tuple[float, float]) -> None:
    """Contract 4, with momentum and weight decay at hand from a step before."""
    weights = tiny_weights()
    trained = learner(weights, weight_decay=0.1)
    trained.step([two_answers(weights)])
    before, version = parameters_of(trained), weights.version
    counts = msgspec.structs.replace(trained.optimizer.counts)
    metrics = trained.step([two_answers(weights, good=rewards[0], bad=rewards[1])])
    assert_unchanged(trained, before)
    assert (metrics.num_updates, metrics.no_signal_share, metrics.tokens_computed) == (0, 1.0, 0)
    assert math.isnan(metrics.loss)
    assert weights.version == version
    assert trained.optimizer.counts == counts


def test_a_group_without_signal_adds_nothing_to_one_that_has_some() -> None:
    """Over the trained ones not even to the denominator: the gradient is that of the other group alone."""
    weights, loss = tiny_weights(), GrpoConfig(mean_over="trained")
    flat, group = two_answers(weights, good=0.3, bad=0.3, group="flat"), two_answers(weights)
    alone, both = Caught(learner(weights, loss)), Caught(learner(weights, loss))
    alone.learner.step([group])
    metrics = both.learner.step([flat, group])
    assert metrics.no_signal_share == 0.5
    for name, gradient in alone.gradient.items():
        assert torch.equal(both.gradient[name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        GrpoConfig(mean_over="all", kl=0.1),
        GspoConfig(name="gspo", mean_over="all"),
        DrGrpoConfig(name="dr_grpo"),
        RlooConfig(name="rloo", mean_over="all"),
        MaxrlConfig(name="maxrl", mean_over="all"),
    ],
    ids=lambda loss: loss.name,
)
def test_over_all_trajectories_the_gradient_shrinks_with_the_signal(loss: LossConfig) -> None:
    """One group of two with signal, three of the same size without: a quarter of what it is alone. With two updates a
    step the mean of each is over half the trajectories: a half, in the one update that there is to take.
    """
    weights = tiny_weights()
    flat = [two_answers(weights, good=0.3, bad=0.3, group=f"flat {index}") for index in range(3)]
    alone = Caught(learner(weights, loss, max_grad_norm=1e9))
    alone.learner.step([two_answers(weights)])
    for updates, factor in ((1, 0.25), (2, 0.5)):
        caught = Caught(learner(weights, loss, max_grad_norm=1e9, updates_per_step=updates))
        assert caught.learner.step([*flat, two_answers(weights)]).no_signal_share == 0.75
        for name, gradient in alone.gradient.items():
            torch.testing.assert_close(caught.gradient[name], factor * gradient, rtol=1e-5, atol=1e-9)


def test_failed_trajectories_are_counted_and_not_trained_on() -> None:
    weights = tiny_weights()
    group = two_answers(weights)
    failed = scored([turn([1], [2])], None, index=2, error="timeout: 600 s")
    metrics = learner(weights).step([[*group, failed]])
    assert (metrics.num_trajectories, metrics.num_failed, metrics.num_samples) == (3, 1, 2)
    assert (metrics.reward_mean, metrics.reward_std) == (0.5, 0.5)


def test_tokens_are_counted_flat_computed_and_trained() -> None:
    """1 2 3 [20 21 22] and 1 2 3 [20 31 32]: 12 tokens flat, 8 in the tree (1 2 3 20 | 21 22 | 31 32), 6 trained."""
    weights = tiny_weights()
    metrics = learner(weights).step([two_answers(weights)])
    assert (metrics.tokens_flat, metrics.tokens_computed, metrics.tokens_trained) == (12, 8, 6)


def test_a_finished_trajectory_without_a_reward_is_refused() -> None:
    with pytest.raises(LearnerError, match="trajectory g/1: its reward is None; judge it first"):
        learner(WEIGHTS).step([[scored([turn([1], [2])], 1.0), scored([turn([1], [2])], None, index=1)]])


# --- contract 2 -------------------------------------------------------------------------------------------------------


def test_the_gap_between_engine_and_learner_is_measured() -> None:
    """The engine's logprobs moved by 0.03 and -0.01: mean 0.02, largest 0.03."""
    weights = tiny_weights()
    group = two_answers(weights)
    for trajectory, shift in zip(group, (0.03, -0.01), strict=True):
        [only] = trajectory.turns
        trajectory.turns = [turn(only.prompt_ids, only.sampled_ids, logprobs=[x + shift for x in only.logprobs])]
    metrics = learner(weights).step([group])
    assert metrics.logprob_gap == pytest.approx(0.02, abs=1e-5)
    assert metrics.logprob_gap_max == pytest.approx(0.03, abs=1e-5)


def test_past_the_bound_the_step_stops_and_changes_nothing() -> None:
    trained = learner(tiny_weights(seed=0), max_logprob_gap=0.05)
    before = parameters_of(trained)
    with pytest.raises(DriftError, match=r"differ by \d.* nats per token .* over train.max_logprob_gap = 0.05"):
        trained.step([two_answers(tiny_weights(seed=5))])
    assert_unchanged(trained, before)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_truncated_sampling_is_compared_by_raw_logprobs_and_trained_from_ratio_1(temperature: float) -> None:
    """top_k 2 and greedy renormalise: the engine's logprobs (here 0) are then no logprobs of the learner's."""
    weights = tiny_weights()
    group = two_answers(weights)
    for trajectory in group:
        [only] = trajectory.turns
        fields = {"raw_logprobs": only.raw_logprobs, "top_k": 2, "temperature": temperature}
        trajectory.turns = [turn(only.prompt_ids, only.sampled_ids, **fields)]
    metrics = learner(weights, GrpoConfig(scale_advantages=False)).step([group])
    assert metrics.logprob_gap < 1e-5
    assert metrics.clip_fraction == 0
    # ratio 1, advantages +-1/2 over three tokens each: the mean of -r A is 0
    assert metrics.loss == pytest.approx(0, abs=1e-6)


def test_what_the_engine_did_not_say_is_not_compared() -> None:
    weights = tiny_weights()
    group = [
        scored([turn([1, 2], [answer], raw_logprobs=None, top_p=0.9)], float(answer), index=answer) for answer in (0, 1)
    ]
    assert math.isnan(learner(weights).step([group]).logprob_gap)


def test_score_is_the_plain_logprob() -> None:
    ids = [5, 9, 260, 3, 3, 17]
    for temperature in (1.0, 0.7):
        expected = logprobs_of(WEIGHTS, ids, temperature).tolist()
        assert learner(WEIGHTS).score(ids, temperature=temperature) == pytest.approx(expected, abs=1e-5)
    assert learner(WEIGHTS).score([5]) == []


# --- several updates per step -----------------------------------------------------------------------------------------


def test_a_batch_split_over_updates_is_that_many_steps_on_its_groups() -> None:
    """Two updates on two groups change the weights as two steps on one group each do, from the same samples."""
    one, two = tiny_weights(), tiny_weights()
    groups = [two_answers(one, group="a"), two_answers(one, good=0.0, bad=1.0, group="b")]
    whole, apart = learner(one, updates_per_step=2), learner(two)
    metrics = whole.step(groups)
    assert metrics.num_updates == 2
    for group in groups:
        apart.step([group])
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, apart.parameters[name]), name


def test_epochs_train_on_a_batch_again_against_the_logprobs_that_sampled_it() -> None:
    """Three epochs change the weights as three steps on the same samples do, and count each sample once."""
    one, two = tiny_weights(), tiny_weights()
    groups = [two_answers(one, group="a"), two_answers(one, good=0.0, bad=1.0, group="b")]
    knobs = {"updates_per_step": 2, "learning_rate": 0.02, "max_logprob_gap": 100.0}
    whole, apart = learner(one, epochs_per_step=3, **knobs), learner(two, **knobs)
    metrics, first, *_ = whole.step(groups), *(apart.step(groups) for _ in range(3))
    assert (metrics.num_updates, first.num_updates) == (6, 2)
    assert metrics.tokens_trained == first.tokens_trained
    assert metrics.num_samples == first.num_samples
    assert metrics.clip_fraction > first.clip_fraction
    assert metrics.logprob_change > 0.01
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, apart.parameters[name]), name


def test_the_change_of_the_logprobs_is_that_between_the_epochs() -> None:
    """With two epochs of one update it is the mean of |logprob after the update - before|; with one it is not known."""
    one, two = tiny_weights(), tiny_weights()
    group = two_answers(one)
    once, twice = (
        learner(one, epochs_per_step=1, learning_rate=0.02),
        learner(two, epochs_per_step=2, learning_rate=0.02),
    )

    def logprobs() -> np.ndarray[Any, Any]:
        rows = [once.score([*t.turns[0].prompt_ids, *t.turns[0].sampled_ids])[-3:] for t in group]
        return np.array(rows)

    before = logprobs()
    assert math.isnan(once.step([group]).logprob_change)
    expected = float(np.abs(logprobs() - before).mean())
    assert twice.step([group]).logprob_change == pytest.approx(expected, rel=1e-3)


def test_importance_weights_of_every_epoch_are_those_of_the_weights_that_sampled() -> None:
    """Learner and engine agree, so all weights are 1, also where an epoch before has moved the policy away."""
    weighted, plain = tiny_weights(), tiny_weights()
    knobs = {"epochs_per_step": 3, "learning_rate": 0.02}
    groups = [two_answers(weighted)]
    metrics = learner(weighted, GrpoConfig(off_policy={"name": "truncate", "cap": 1.5}), **knobs).step(groups)
    expected = learner(plain, **knobs).step(groups)
    assert metrics.loss == pytest.approx(expected.loss, abs=1e-5)
    assert metrics.clip_fraction == expected.clip_fraction
    assert metrics.logprob_gap < 1e-5  # measured before the first update, and once


def test_later_updates_are_corrected_against_the_weights_that_sampled() -> None:
    """With off_policy the old logprobs are the learner's at the step's start, not at the update's: after a first
    update with a large rate the second's ratios are off 1, and some are clipped.
    """
    weights = tiny_weights()
    groups = [two_answers(weights, group=name) for name in "ab"]
    metrics = learner(
        weights, GrpoConfig(off_policy={"name": "truncate"}), learning_rate=0.05, updates_per_step=2
    ).step(groups)
    assert metrics.clip_fraction > 0
    assert metrics.logprob_gap < 1e-5  # of both updates' groups, measured before the first


# --- the trust region -------------------------------------------------------------------------------------------------


def estimated_kl(trained: TorchLearner, before: dict[str, torch.Tensor], group: list[ScoredTrajectory]) -> float:
    """KL(before || now) between each of the group's tokens and any other, one sequence at a time: the mean."""

    def logprobs() -> torch.Tensor:
        rows = [chosen_logprobs(trained.weights, ids, places) for t in group for ids, places in leaves(t.turns)]
        return torch.cat(rows).detach().double()

    now, after = logprobs(), parameters_of(trained)
    set_parameters(trained, before)
    then = logprobs()
    set_parameters(trained, after)
    coins = [torch.distributions.Bernoulli(probs=each.exp()) for each in (then, now)]
    return float(torch.distributions.kl_divergence(*coins).mean())


def set_parameters(trained: TorchLearner, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in trained.parameters.items():
            parameter.copy_(values[name])


def test_an_update_within_the_bound_is_measured_and_stays() -> None:
    plain, bounded = learner(tiny_weights()), learner(tiny_weights(), max_kl=10.0)
    group, before = two_answers(plain.weights), parameters_of(bounded)
    assert math.isnan(plain.step([group]).update_kl)
    metrics = bounded.step([group])
    assert_unchanged(bounded, parameters_of(plain))
    assert metrics.update_share == 1
    assert metrics.update_kl == pytest.approx(estimated_kl(bounded, before, group), rel=1e-3)


def test_an_update_past_the_bound_is_shortened_until_it_is_within() -> None:
    """To a tenth of its KL, in one or two looks. The weights are then on the line to the whole update.

    Each measurement, of one pack, is reported, because a learner of several processes may not be silent for long.
    """
    plain = learner(tiny_weights(), learning_rate=0.005)
    group, before = two_answers(plain.weights), parameters_of(plain)
    plain.step([group])
    whole = estimated_kl(plain, before, group)
    bounded = learner(tiny_weights(), learning_rate=0.005, max_kl=whole / 10)
    reported: list[tuple[int, int]] = []
    metrics = bounded.step([group], progress=lambda *numbers: reported.append(numbers))
    assert 0.1 < metrics.update_share < 0.4
    assert reported == [(1, 1)] * len(reported) and len(reported) in (3, 4)  # update, its KL, one or two looks
    assert metrics.update_kl == pytest.approx(estimated_kl(bounded, before, group), rel=1e-3)
    assert whole / 40 < metrics.update_kl <= whole / 10
    for name, value in parameters_of(plain).items():
        expected = before[name] + metrics.update_share * (value - before[name])
        torch.testing.assert_close(bounded.parameters[name].detach(), expected)


def test_past_the_bound_the_steps_other_updates_are_left_out(tmp_path: Path) -> None:
    """The moments are those of the update that was taken; the bound is so small that none of it is kept."""
    weights = tiny_weights()
    groups = [two_answers(weights, group=name) for name in "ab"]
    trained = learner(weights, learning_rate=0.05, updates_per_step=2, max_kl=1e-12)
    before = parameters_of(trained)
    metrics = trained.step(groups)
    assert (metrics.num_updates, metrics.update_share, metrics.update_kl) == (1, 0, 0)
    assert_unchanged(trained, before)
    assert trained.optimizer.counts.num_updates == 1
    trained.write_learned(tmp_path / "learned.jsonl")
    reasons = [json.loads(line).get("left_out") for line in (tmp_path / "learned.jsonl").read_text().splitlines()]
    assert sorted(map(str, reasons)) == ["None", "None", "max_kl", "max_kl"] and metrics.num_samples == 2


@pytest.mark.parametrize("has_adapter", [True, False])
def test_epochs_end_where_the_policy_leaves_the_bound(has_adapter: bool) -> None:
    """Four epochs go past a third of their KL. With an adapter the next epoch's pass is the measurement, and without a
    breach only the last update costs a pass of its own, or none if the bound is far away."""

    rank, knobs = 4 if has_adapter else None, {"learning_rate": 0.005 if has_adapter else 0.002, "epochs_per_step": 4}
    plain = learner(tiny_weights(lora_rank=rank), **knobs)
    group, before = two_answers(plain.weights), parameters_of(plain)
    plain.step([group])
    whole = estimated_kl(plain, before, group)
    wide, narrow = (learner(tiny_weights(lora_rank=rank), max_kl=share * whole, **knobs) for share in (2, 1 / 3))
    reported: list[tuple[int, int]] = []
    metrics = wide.step([group], progress=lambda *numbers: reported.append(numbers))
    assert_unchanged(wide, parameters_of(plain))
    assert (metrics.num_updates, metrics.update_share) == (4, 1)
    assert len(reported) == (4 + 1 if has_adapter else 4 + 4)
    assert metrics.update_kl == pytest.approx(estimated_kl(wide, before, group), rel=1e-3)
    far, reported = learner(tiny_weights(lora_rank=rank), max_kl=40 * whole, **knobs), []
    metrics = far.step([group], progress=lambda *numbers: reported.append(numbers))
    assert_unchanged(far, parameters_of(plain))
    assert len(reported) == (4 if has_adapter else 4 + 4)
    assert whole / 2 < metrics.update_kl < 2 * whole
    metrics = narrow.step([group])
    assert metrics.num_updates < 4 and metrics.update_share < 1
    assert 0 < metrics.update_kl <= whole / 3
    assert metrics.update_kl == pytest.approx(estimated_kl(narrow, before, group), rel=1e-3)


@pytest.mark.parametrize(("mean_over", "share"), [("all", 0.5), ("trained", 1.0)])
def test_the_bound_shrinks_with_the_share_of_groups_that_have_signal(mean_over: MeanOver, share: float) -> None:
    """One of two groups has equal rewards. The largest update within the bound is kept."""
    weights = tiny_weights()
    signal = two_answers(weights, group="signal")
    equal = [msgspec.structs.replace(each, reward=1.0) for each in two_answers(weights, group="equal")]
    loss, knobs = GrpoConfig(mean_over=mean_over), {"learning_rate": 0.02}
    whole = learner(weights, loss, max_kl=100.0, **knobs).step([signal, equal]).update_kl
    for factor, is_whole in ((1.01, True), (0.99, False)):
        bounded = learner(tiny_weights(), loss, max_kl=factor * whole / share, **knobs)
        assert (bounded.step([signal, equal]).update_share == 1) == is_whole


def test_when_the_kl_cannot_be_measured_the_update_is_taken_back() -> None:
    weights = tiny_weights()
    trained = learner(weights, max_kl=1.0)
    before = parameters_of(trained)
    trained.gradient.divergence = fails  # type: ignore[method-assign]
    with pytest.raises(LearnerError, match="out of memory"):
        trained.step([two_answers(weights)])
    assert_unchanged(trained, before)
    assert trained.optimizer.counts.num_updates == 0


def fails(update: object, **given: object) -> float:
    raise torch.OutOfMemoryError("here")


# --- failures ---------------------------------------------------------------------------------------------------------


def test_when_a_later_update_fails_the_first_is_taken_back() -> None:
    weights = tiny_weights()
    trained = learner(weights, updates_per_step=2)
    good, bad = two_answers(weights, group="good"), two_answers(weights, group="bad")
    [only] = bad[1].turns
    bad[1].turns = [turn(only.prompt_ids, only.sampled_ids, logprobs=[-1.0, -1000.0, -1.0])]
    before = parameters_of(trained)
    with pytest.raises(LearnerError, match="trajectory bad/1, turn 0: its loss is not finite; no weight was changed"):
        trained.step([good, bad])
    assert_unchanged(trained, before)
    assert trained.optimizer.counts.num_updates == 0
    assert trained.optimizer.tensors() == {}


def test_a_gradient_that_is_not_finite_names_its_trajectory() -> None:
    """Ratio exp(60) with A < 0: the loss, about 1e26, is finite; squared for the gradient's norm it is not."""
    weights = tiny_weights()
    trained = learner(weights, max_logprob_gap=100.0)
    group = two_answers(weights)
    [only] = group[1].turns
    group[1].turns = [turn(only.prompt_ids, only.sampled_ids, logprobs=[only.logprobs[0] - 60.0, *only.logprobs[1:]])]
    before = parameters_of(trained)
    with pytest.raises(LearnerError, match="trajectory g/1, turn 0: its gradient is not finite"):
        trained.step([group])
    assert_unchanged(trained, before)
