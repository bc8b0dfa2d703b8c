"""The loss of one pack: what an algorithm gives for its terms, added up over the components of the loss.

Each component (../samples.py) is divided by its counts over the whole optimizer step, by the algorithm's share. So
the sum over any packing is the same loss.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.objectives import PolicyTerms, ValueTerms
from art_cli.learners.samples import COMPONENTS, Row


class LossTerms(NamedTuple):
    """The N terms of one pack, one per trained token of each of its samples, as float32 tensors."""

    new: Tensor  # [N] logprobs under the current weights; carries the gradient
    old: Tensor  # [N] logprobs under the weights that sampled
    samples: Tensor  # [N] int64: index of the term's sample in the pack
    weights: Tensor  # [6, N] by Row; NaN: the term is not in the row
    shares: Tensor  # [4, N] the factor of each term in the mean of each component
    importance: Tensor | None = None  # [N] weights of the objective (off_policy.py); 0: the term is left out
    reference: Tensor | None = None  # [N] logprobs under the reference policy, if a term is in reference_kl
    entropies: Tensor | None = None  # [N] entropy in nats where the term was sampled, with gradient, for a bonus
    entropy_bonus: float = 0.0  # reward of a nat of entropy
    values: Tensor | None = None  # [N] the critic's value before each token, if there is one; carries the gradient

    def terms_in(self, row: Row) -> Tensor:
        """Returns the indexes of the terms that are in that row of the weights."""
        return (~self.weights[row].isnan()).nonzero()[:, 0]


class PackLoss(NamedTuple):
    loss: Tensor  # scalar: this pack's part of the loss
    parts: Tensor  # [N] the loss of each term, detached; their sum is `loss`
    is_clipped: Tensor | None  # one per term in the policy component, if there is a clip
    kl: Tensor | None  # k3 of each term in reference_kl, detached, if there are any
    value_errors: Tensor | None = None  # error of each term in value, detached, if there is a critic
    old_kl: Tensor | None = None  # k3 of each term held near its old probability, detached, if there are any


def pack_loss(algorithm: Algorithm, terms: LossTerms) -> PackLoss:
    """Sum over terms of

        share * importance * objective      in policy
        share * importance * weight * k3    in policy, of the terms that are held near their old probability
        share * -bonus * entropy            in policy
        share * weight * -log p             in cross_entropy
        share * weight * k3                 in reference_kl
        share * error                       in value

    A pack without terms adds zero.
    """
    policy, imitated, near, valued = map(terms.terms_in, COMPONENTS)
    parts, is_clipped, divergence, errors = torch.zeros_like(terms.new), None, None, None
    old_kl: Tensor | None = None
    if len(policy):
        objective = algorithm.objective(
            PolicyTerms(terms.new[policy], terms.old[policy], terms.weights[Row.POLICY, policy], terms.samples[policy])
        )
        values = objective.values if terms.importance is None else objective.values * terms.importance[policy]
        parts = parts.index_add(0, policy, values * terms.shares[Row.POLICY, policy])
        is_clipped = objective.is_clipped
    held = terms.terms_in(Row.NEAR_OLD)
    if len(held):
        old_kl = k3(terms.old[held], terms.new[held])  # KL(old || new): the old policy sampled the tokens
        factors = terms.weights[Row.NEAR_OLD, held] * terms.shares[Row.POLICY, held]
        factors = factors if terms.importance is None else factors * terms.importance[held]
        parts = parts.index_add(0, held, old_kl * factors)
    if terms.entropies is not None:
        parts = parts.index_add(
            0, policy, -terms.entropy_bonus * terms.entropies[policy] * terms.shares[Row.POLICY, policy]
        )
    if terms.reference is not None:
        divergence = k3(terms.new[near], terms.reference[near])
        factors = terms.weights[Row.REFERENCE_KL, near] * terms.shares[Row.REFERENCE_KL, near]
        parts = parts.index_add(0, near, divergence * factors)
    # these two are computed without terms as well, because a process of several runs a backward pass even for an idle
    # pack
    if terms.values is not None:
        targets, old = terms.weights[Row.VALUE, valued], terms.weights[Row.OLD_VALUE, valued]
        errors = algorithm.value_error(ValueTerms(terms.values[valued], old, targets))
        parts = parts.index_add(0, valued, errors * terms.shares[Row.VALUE, valued])
    factors = terms.weights[Row.CROSS_ENTROPY, imitated] * terms.shares[Row.CROSS_ENTROPY, imitated]
    parts = parts.index_add(0, imitated, -terms.new[imitated] * factors)
    return PackLoss(
        parts.sum(), parts.detach(), is_clipped, _detached(divergence), _detached(errors), _detached(old_kl)
    )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Returns [N] exp(d) - d - 1 with d = reference - new: never negative, zero where they agree; nats per token.

    Schulman 2020, "Approximating KL Divergence". Its mean over tokens sampled from the policy is
    KL(policy || reference); GRPO, arXiv:2402.03300, equation 4.
    """
    difference = reference - new
    return difference.exp() - difference - 1
