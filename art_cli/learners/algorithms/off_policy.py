"""Off-policy corrections: weights for tokens sampled by a policy that differs from the learner's.

The ratio rho = pi_learner / pi_engine compares the learner's probability for a token at the start of the step with the
probability reported by the engine at sampling time. They differ by the engine's rounding, and with train.max_staleness
also by the steps in between. Where the engine's logprob is NaN (truncated sampling), no correction is possible and the
weight is 1. All weights are detached.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.objectives import sample_mean
from art_cli.learners.algorithms.pack_loss import binary_kl


class SampledTerms(NamedTuple):
    """N terms in a pack, as tensors of [N]. `advantages` is NaN for terms outside the policy component."""

    new: Tensor  # logprobs under the current weights
    learner: Tensor  # logprobs under the learner's weights at the start of the step
    engine: Tensor  # logprobs reported by the engine; NaN: not comparable
    advantages: Tensor
    samples: Tensor  # int64: index of the term's sample in the pack


Correction = Callable[[SampledTerms], Tensor]  # [N] objective weights; 0 drops the term


def build_correction(config: loss_config.OffPolicyConfig | None) -> Correction | None:
    """Returns the configured correction; None without a configuration."""
    match config:
        case None:
            return None
        case loss_config.TruncateConfig():
            return lambda terms: truncated_weights(terms.learner, terms.engine, cap=config.cap)
        case loss_config.IcepopConfig():
            return lambda terms: icepop_weights(terms.learner, terms.engine, low=config.low, high=config.high)
        case loss_config.SequenceMaskConfig():
            return lambda terms: sequence_mask_weights(terms, low=config.low, high=config.high, cap=config.cap)
        case loss_config.DppoConfig():
            return lambda terms: dppo_weights(terms, divergence=config.divergence, delta=config.delta, cap=config.cap)


def truncated_weights(learner: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """Returns [N] min(rho, cap).

    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (fengyao.notion.site/off-policy-rl); Ionides 2008, equation 2.
    """
    return (learner - engine).nan_to_num(nan=0.0).exp().clamp(max=cap).detach()


def icepop_weights(learner: Tensor, engine: Tensor, *, low: float, high: float) -> Tensor:
    """Returns [N] rho if between `low` and `high`, otherwise 0. IcePop, Ring-1T 2025 (arXiv:2510.18855)."""
    ratio = (learner - engine).nan_to_num(nan=0.0).exp().detach()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def sequence_mask_weights(terms: SampledTerms, *, low: float, high: float, cap: float) -> Tensor:
    """Returns [N] min(rho, cap) for samples whose geometric mean of rho is between `low` and `high`, otherwise 0.

    The mean is over the sample's policy tokens with comparable engine logprobs. Liu et al. 2025, "When Speed Kills
    Stability" (geometric rejection sampling). Unlike the product, the mean does not shrink or grow with the sample's
    length.
    """
    difference = (terms.learner - terms.engine).detach()
    is_known = ~(difference.isnan() | terms.advantages.isnan())
    mean = sample_mean(difference.nan_to_num(nan=0.0) * is_known, terms.samples)
    known_share = sample_mean(is_known.to(mean.dtype), terms.samples)
    ratio = torch.where(known_share > 0, mean / known_share, 0.0).exp()
    weights = truncated_weights(terms.learner, terms.engine, cap=cap)
    return torch.where((ratio >= low) & (ratio <= high), weights, 0.0)


def dppo_weights(terms: SampledTerms, *, divergence: Literal["tv", "kl"], delta: float, cap: float) -> Tensor:
    """Returns [N] min(rho, cap), or 0 for updates that would move the policy further than `delta` from the engine's.

    DPPO, Qi et al. 2026 (arXiv:2602.04879), the binary approximations: with the sampled token's probability mu (engine)
    and p (current), the divergence is |p - mu| (tv) or mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)) (kl). A token
    is dropped if the divergence exceeds `delta` and the advantage pushes p further away from mu (positive with p > mu,
    or negative with p < mu). The paper does not cap the ratio; verl caps it at 20.
    """
    new, engine = terms.new.detach(), terms.engine
    now, then = new.exp(), engine.exp()
    distance = (now - then).abs() if divergence == "tv" else binary_kl(engine, new)
    moves_away = ((terms.advantages > 0) & (now > then)) | ((terms.advantages < 0) & (now < then))
    weights = truncated_weights(terms.learner, engine, cap=cap)
    return weights.masked_fill(moves_away & (distance > delta), 0.0)
