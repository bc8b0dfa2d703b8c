"""Clip-Cov: which tokens of an update have no gradient."""

import math
from dataclasses import replace

import numpy as np

from art_cli.config.schema import GrpoConfig
from art_cli.learners.covariance import without_covariant
from art_cli.learners.samples import Sample
from art_cli.learners.token_weights import POLICY
from tests.learners.test_learner import Caught, learner, two_answers
from tests.support.tiny import tiny_weights
from tests.support.trees import samples_of, scored, turn


def sample(logprobs: list[float], advantages: list[float]) -> Sample:
    tokens = list(range(len(logprobs)))
    [made] = samples_of(scored([turn([1, 2], tokens, logprobs=logprobs, raw_logprobs=logprobs)], 1.0))
    weights = made.weights.copy()
    weights[POLICY] = advantages
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


def test_the_gradient_is_the_same_for_every_packing() -> None:
    weights = tiny_weights()
    groups = [two_answers(weights, group="a"), two_answers(weights, good=0.2, bad=0.9, group="b")]
    gradients = []
    for packing, budget in (("rows", 1), ("tree", 4096)):
        loss = GrpoConfig(clip_cov=0.3)
        caught = Caught(learner(weights, loss, packing=packing, micro_batch_tokens=budget, max_grad_norm=1e9))
        caught.learner.step(groups)
        gradients.append(caught.gradient)
    plain = Caught(learner(weights, max_grad_norm=1e9))
    plain.learner.step(groups)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients[0].values()))
    for other, is_same in ((gradients[1], True), (plain.gradient, False)):
        error = math.sqrt(sum(float((gradients[0][n] - other[n]).square().sum()) for n in other))
        assert (error <= 1e-5 * norm) == is_same
