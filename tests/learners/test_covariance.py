"""Clip-Cov and KL-Cov: which tokens of an update have no gradient, or are held where they were."""

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from art_cli.config.schema import GrpoConfig
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.samples import Row, Sample
from art_cli.learners.step.step_samples import near_covariant, without_covariant
from tests.learners.test_presets import GROUPS, WEIGHTS
from tests.support.models.gradients import Caught, chosen_logprobs, distance, learner, leaves, two_answers
from tests.support.models.tiny import tiny_weights
from tests.support.records.trees import samples_of, scored, turn


def sample(logprobs: list[float], advantages: list[float]) -> Sample:
    tokens = list(range(len(logprobs)))
    [made] = samples_of(scored([turn([1, 2], tokens, logprobs=logprobs, raw_logprobs=logprobs)], 1.0))
    weights = made.weights.copy()
    weights[Row.POLICY] = advantages
    return replace(made, weights=weights)


def test_the_tokens_of_the_largest_covariance_lose_their_advantage_over_all_samples() -> None:
    """Logprobs -1 -3, -1 -3, mean -2; advantages 2 2, -1 -3, mean 0: products 2 -2, -1 3. The largest two are 2 and 3.

    A share of 0.74 is two of four tokens; all four would take the positive ones only.
    """
    samples = [sample([-1.0, -3.0], [2.0, 2.0]), sample([-1.0, -3.0], [-1.0, -3.0])]
    for share in (0.74, 0.99):
        found = [each.advantages.tolist() for each in without_covariant(samples, share)]
        assert found == [[0.0, 2.0], [-1.0, 0.0]]
    [first, second] = without_covariant(samples, 0.25)
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([2.0, 2.0], [-1.0, 0.0])
    assert without_covariant(samples, 0.2) == samples


def test_a_token_whose_logprob_or_advantage_is_not_known_is_neither_chosen_nor_counted() -> None:
    known = sample([-1.0, -3.0], [2.0, 2.0])
    silent = replace(known, logprobs=np.full(2, math.nan), raw_logprobs=np.full(2, math.nan))
    other = sample([-1.0, -3.0], [-1.0, math.nan])
    found = [each.advantages.tolist() for each in without_covariant([silent, known, other], 0.4)]
    np.testing.assert_equal(found, [[2.0, 2.0], [0.0, 2.0], [-1.0, math.nan]])


def test_the_same_tokens_are_held_near_their_old_probability_with_that_weight() -> None:
    """The products of the test above: 2 -2, -1 3. Half of four tokens: those of 2 and 3 get the weight 0.5."""
    samples = [sample([-1.0, -3.0], [2.0, 2.0]), sample([-1.0, -3.0], [-1.0, -3.0])]
    found = near_covariant(samples, 0.5, 0.5)
    np.testing.assert_equal([each.weights[Row.NEAR_OLD].tolist() for each in found], [[0.5, math.nan], [math.nan, 0.5]])
    assert [each.advantages.tolist() for each in found] == [[2.0, 2.0], [-1.0, -3.0]]


def gradient(loss: GrpoConfig, packing: str = "rows", budget: int = 1) -> dict[str, torch.Tensor]:
    caught = Caught(learner(WEIGHTS, loss, packing=packing, micro_batch_tokens=budget, max_grad_norm=1e9))
    caught.learner.step(GROUPS)
    return caught.gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [GrpoConfig(clip_cov=0.3), GrpoConfig(kl_cov=0.3, kl_cov_weight=5.0)], ids=["clip_cov", "kl_cov"]
)
def test_the_gradient_is_the_same_for_every_packing(loss: GrpoConfig) -> None:
    """Contract 1. The engine's logprobs are off by 0.1 nats of noise, as if the policy had moved since."""
    expected = gradient(loss)
    for packing, budget in (("tree", 24), ("tree", 4096), ("rows", 4096)):
        assert distance(gradient(loss, packing, budget), expected) <= 1e-5
    assert distance(gradient(GrpoConfig()), expected) > 1e-2


def test_the_gradient_of_kl_cov_is_that_of_one_token_at_a_time() -> None:
    """The plain gradient, and that of 5 * mean over all tokens of (r - 1 - log r), for the chosen 30 % of them."""
    knobs: dict[str, Any] = {"mean_over": "trained"}
    found, plain = gradient(GrpoConfig(kl_cov=0.3, kl_cov_weight=5.0, **knobs)), gradient(GrpoConfig(**knobs))
    tokens = []  # (advantage, logprob that the engine told, ids, place)
    for group in GROUPS:
        for trajectory, advantage in zip(group, advantages(rewards_of(group), scale=False), strict=True):
            for ids, places in leaves(trajectory.turns):
                tokens += [(advantage, turn.logprobs[at], ids, (place, turn, at)) for place, turn, at in places]
    tokens = [token for token in tokens if token[0] != 0]
    means = [statistics.fmean(column) for column in zip(*[token[:2] for token in tokens], strict=True)]
    tokens.sort(key=lambda token: -(token[0] - means[0]) * (token[1] - means[1]))
    WEIGHTS.model.zero_grad()
    for _, old, ids, place in tokens[: int(0.3 * len(tokens))]:
        moved = chosen_logprobs(WEIGHTS, ids, [place])[0] - old
        (5.0 * (moved.exp() - 1 - moved) / len(tokens)).backward()
    penalty = {name: p.grad.clone() for name, p in WEIGHTS.model.named_parameters() if p.grad is not None}
    WEIGHTS.model.zero_grad()
    assert distance(found, {name: plain[name] + penalty[name] for name in plain}) <= 1e-5


def test_what_kl_cov_holds_moves_less_and_is_told() -> None:
    """Four epochs on one group. The KL of the held tokens is much smaller with a weight of 10 than with one of 1e-6."""
    kls = []
    for weight in (1e-6, 10.0):
        weights = tiny_weights()
        loss = GrpoConfig(kl_cov=0.5, kl_cov_weight=weight, clip=100.0)
        trained = learner(weights, loss, epochs_per_step=4, learning_rate=2e-3)
        kls.append(trained.step([two_answers(weights)]).kl_cov)
    assert 0 < kls[1] < 0.7 * kls[0], kls
