"""Adds up what an algorithm gives for the terms of a pack, with the terms that any algorithm can have besides.

These are the KL to the reference policy and truncated importance weights.
"""

from typing import NamedTuple

from torch import Tensor

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.objectives import PolicyTerms


class LossTerms(NamedTuple):
    """The terms of one pack, as tensors of [N] float32, with what multiplies or joins the objective."""

    policy: PolicyTerms
    shares: Tensor
    importance: Tensor | None = None  # truncated importance weights
    reference: Tensor | None = None  # logprobs under the reference policy


class PackLoss(NamedTuple):
    loss: Tensor  # scalar: this pack's part of the step's loss
    parts: Tensor  # [N] the loss of each term, detached; their sum is `loss`
    is_clipped: Tensor | None  # [N]; None: there is no clip
    kl: Tensor | None  # [N] k3 of each term, detached


def pack_loss(algorithm: Algorithm, terms: LossTerms, *, kl: float = 0.0) -> PackLoss:
    """Sum over terms of share * (importance * objective + kl * k3). A pack without terms adds zero."""
    values, is_clipped = algorithm.objective(terms.policy)
    if terms.importance is not None:
        values = values * terms.importance
    divergence = None
    if terms.reference is not None:
        divergence = k3(terms.policy.new, terms.reference)
        values = values + kl * divergence
    parts = values * terms.shares
    return PackLoss(parts.sum(), parts.detach(), is_clipped, None if divergence is None else divergence.detach())


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """[N] exp(d) - d - 1 with d = reference - new: never negative, zero where they agree; nats per token.

    Schulman 2020, "Approximating KL Divergence". Its mean over tokens sampled from the policy is
    KL(policy || reference); GRPO, arXiv:2402.03300, equation 4.
    """
    difference = reference - new
    return difference.exp() - difference - 1


def truncated_weights(learner: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """[N] min(pi_learner / pi_engine, cap) of each token, both at the weights that sampled it; detached.

    Where the engine's logprob is NaN (it sampled from a cut distribution) there is nothing to correct with: 1.
    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (fengyao.notion.site/off-policy-rl); Ionides 2008, equation 2.
    """
    return (learner - engine).exp().clamp(max=cap).nan_to_num(nan=1.0).detach()
