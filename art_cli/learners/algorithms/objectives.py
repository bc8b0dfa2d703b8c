"""Objectives: each trained token's contribution to the loss, before its share. Pure functions on [N] tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20.0  # maximum change in a sample's logprob, in nats; e^20 is far beyond every clip


class PolicyTerms(NamedTuple):
    """N terms, one per trained token in a pack's samples, as float32 tensors of [N].

    Samples in a pack that share a token have separate terms with the same `new`.
    """

    new: Tensor  # logprobs under the current weights; carries the gradient
    old: Tensor  # logprobs under the sampling weights
    advantages: Tensor
    samples: Tensor  # int64: index of the term's sample in the pack


class ValueTerms(NamedTuple):
    """N critic values for the states before a turn's initial sampled token, as float32 tensors of [N]."""

    new: Tensor  # under the current weights; carries the gradient
    old: Tensor  # before the step
    targets: Tensor


class Objective(NamedTuple):
    """An objective's values for N terms."""

    values: Tensor  # [N] to be minimized
    is_clipped: Tensor | None = None  # [N] bool: the clip is active; None without clipping


def clip_tokens(terms: PolicyTerms, low: float, high: float) -> Objective:
    """PPO's surrogate with one ratio r = exp(new - old) per token."""
    return clipped_surrogate((terms.new - terms.old).exp(), terms.advantages, low, high)


def clip_samples(terms: PolicyTerms, low: float, high: float) -> Objective:
    """PPO's surrogate with one ratio per sample: the geometric mean of its tokens' ratios. GSPO, equations 5 to 7."""
    return clipped_surrogate(sample_mean(terms.new - terms.old, terms.samples).exp(), terms.advantages, low, high)


def clip_sums(terms: PolicyTerms, low: float, high: float) -> Objective:
    """PPO's surrogate with one ratio per sample: the product of its tokens' ratios.

    Each token carries the whole sample's value. RLOO as in TRL, where a completion is one action. A long sample whose
    sum exceeds LARGEST gets no gradient, because its ratio would overflow.
    """
    moved = sample_sum(terms.new - terms.old, terms.samples).clamp(-LARGEST, LARGEST)
    return clipped_surrogate(moved.exp(), terms.advantages, low, high)


def clip_weights(terms: PolicyTerms, low: float, high: float) -> Objective:
    """Returns [N] -clip(r, 1 - low, 1 + high) A new with the clipped ratio detached. CISPO, equations 4 and 5.

    Only the gradient is meaningful; the value is not a distance. Clipped means that the ratio was cut.
    """
    ratio = (terms.new - terms.old).detach().exp()
    is_clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return Objective(-ratio.clamp(1 - low, 1 + high) * terms.advantages * terms.new, is_clipped)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Objective:
    """Returns [N] -min(r A, clip(r, 1 - low, 1 + high) A), and where the clip blocks the gradient.

    PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; separate bounds are DAPO's clip-higher.

    ratio 1.5, A = 1,  bounds 0.2 -> -1.2, clipped (no gradient) ratio 1.5, A = -1, bounds 0.2 ->  1.5, not clipped (it
    still pushes the ratio down)
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    values = -(ratio * advantages).minimum(bounded * advantages)
    is_clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    return Objective(values, is_clipped)


def clipped_value_error(terms: ValueTerms, clip: float | None) -> Tensor:
    """Returns [N] max((v - target)^2, (old + clamp(v - old, -clip, clip) - target)^2); just (v - target)^2 if
    clip=None.

    A value that has already moved toward its target by `clip` moves no further in this step. PPO, Schulman et al. 2017
    (arXiv:1707.06347), equation 9; its clipped form is OpenAI Baselines' ppo2.

    v 0.5, old 0.0, target 1.0, clip 0.2 -> max(0.25, 0.64) = 0.64, no gradient v 0.5, old 0.0, target 0.0, clip 0.2 ->
    max(0.25, 0.04) = 0.25
    """
    errors = (terms.new - terms.targets).square()
    if clip is None:
        return errors
    near = terms.old + (terms.new - terms.old).clamp(-clip, clip)
    return errors.maximum((near - terms.targets).square())


def sample_mean(values: Tensor, samples: Tensor) -> Tensor:
    """Replaces each value by its sample's mean. Empty input gives empty output."""
    return sample_sum(values, samples) / sample_sum(values.new_ones(values.shape), samples)


def sample_sum(values: Tensor, samples: Tensor) -> Tensor:
    """Replaces each value by its sample's sum. Empty input gives empty output."""
    num_samples = int(samples.max()) + 1 if len(samples) else 0
    return values.new_zeros(num_samples).index_add(0, samples, values)[samples]
