"""One pack's loss: the algorithm's results for the pack's terms, summed over the loss components.

Each component (../samples.py) is normalized by its counts over the whole optimizer step, through the algorithm's share,
so that the sum over packs is the same for any packing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.objectives import PolicyTerms, ValueTerms
from art_cli.learners.samples import COMPONENTS, Row


class LossTerms(NamedTuple):
    """One pack's N terms, one per trained token in every sample, as float32 tensors."""

    new: Tensor  # [N] logprobs under the current weights; carries the gradient
    old: Tensor  # [N] logprobs under the sampling weights
    samples: Tensor  # [N] int64: index of the term's sample in the pack
    weights: Tensor  # [5, N] by Row; NaN: the term is not in the row
    shares: Tensor  # [4, N] the terms' factors in the components' means
    importance: Tensor | None = None  # [N] objective weights (off_policy.py); 0 drops the term
    reference: Tensor | None = None  # [N] logprobs under the reference policy, if any term is in reference_kl
    values: Tensor | None = None  # [N] the critic's value before each token; carries the gradient

    def terms_in(self, row: Row) -> Tensor:
        """Returns the indexes of the terms in this weights row."""
        return (~self.weights[row].isnan()).nonzero()[:, 0]


class PackLoss(NamedTuple):
    loss: Tensor  # scalar: this pack's part of the loss
    parts: Tensor  # [N] each term's loss, detached; they sum to `loss`
    is_clipped: Tensor | None  # one per policy term, if the objective clips
    kl: Tensor | None  # k3 per reference_kl term, detached
    value_errors: Tensor | None = None  # value error per value term, detached, with a critic


def pack_loss(algorithm: Algorithm, terms: LossTerms) -> PackLoss:
    """Returns the sum over terms of

        share * importance * objective      in policy
        share * weight * -log p             in cross_entropy
        share * weight * k3                 in reference_kl
        share * error                       in value

    A pack without terms adds zero.
    """
    policy, imitated, near, valued = map(terms.terms_in, COMPONENTS)
    parts, is_clipped, divergence, errors = torch.zeros_like(terms.new), None, None, None
    if len(policy):
        objective = algorithm.objective(
            PolicyTerms(terms.new[policy], terms.old[policy], terms.weights[Row.POLICY, policy], terms.samples[policy])
        )
        values = objective.values if terms.importance is None else objective.values * terms.importance[policy]
        parts = parts.index_add(0, policy, values * terms.shares[Row.POLICY, policy])
        is_clipped = objective.is_clipped
    if terms.reference is not None:
        divergence = k3(terms.new[near], terms.reference[near])
        factors = terms.weights[Row.REFERENCE_KL, near] * terms.shares[Row.REFERENCE_KL, near]
        parts = parts.index_add(0, near, divergence * factors)
    # these two are computed even without terms, because with several processes an idle pack also runs a backward pass
    if terms.values is not None:
        targets, old = terms.weights[Row.VALUE, valued], terms.weights[Row.OLD_VALUE, valued]
        errors = algorithm.value_error(ValueTerms(terms.values[valued], old, targets))
        parts = parts.index_add(0, valued, errors * terms.shares[Row.VALUE, valued])
    factors = terms.weights[Row.CROSS_ENTROPY, imitated] * terms.shares[Row.CROSS_ENTROPY, imitated]
    parts = parts.index_add(0, imitated, -terms.new[imitated] * factors)
    return PackLoss(parts.sum(), parts.detach(), is_clipped, _detached(divergence), _detached(errors))


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """Returns [N] exp(d) - d - 1 with d = reference - new, in nats per token: non-negative, and zero for equal
    logprobs.

    Schulman 2020, "Approximating KL Divergence". Its mean over tokens sampled from the policy is KL(policy ||
    reference); GRPO, arXiv:2402.03300, equation 4.
    """
    difference = reference - new
    return difference.exp() - difference - 1


def binary_kl(before: Tensor, now: Tensor) -> Tensor:
    """Returns [N] KL(before || now) in nats between two outcomes of a token's draw: the sampled token, or any other.

    DPPO's binary approximation (arXiv:2602.04879), at most the KL of the two distributions. It suits logprobs of tokens
    that were trained on. A probability that rises from 0.01 to 0.05 counts 0.025 here, and 2.4 by `k3`, which then
    estimates no mean any more.
    """
    others = [torch.log(-torch.expm1(logprobs.clamp(max=-1e-12))) for logprobs in (before, now)]
    return before.exp() * (before - now) + others[0].exp() * (others[0] - others[1])
