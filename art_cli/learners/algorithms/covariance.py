"""Clip-Cov and KL-Cov: the tokens that would take most of the policy's entropy away are held back. Numpy only.

Cui et al. 2025 (arXiv:2505.22617), section 4: the entropy falls by about the covariance of log p and advantage.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from art_cli.learners.samples import Sample
from art_cli.learners.token_weights import NEAR_OLD, POLICY


def without_covariant(samples: Sequence[Sample], share: float) -> list[Sample]:
    """Returns the samples of an optimizer step, with advantage 0 for its covariant tokens. They count in the mean.

    Clip-Cov, section 4.2, which takes the gradient of tokens of high covariance away. It draws them at random between
    two bounds; the largest ones are what its KL-Cov takes.
    """
    return _with_row(samples, covariant(samples, share), POLICY, 0.0)


def near_covariant(samples: Sequence[Sample], share: float, weight: float) -> list[Sample]:
    """Returns the samples of an optimizer step, with `weight` * KL(old || new) in the loss of its covariant tokens.

    KL-Cov, section 4.2. Three things differ from the released code. The KL is estimated by k3, whose gradient r - 1
    vanishes smoothly where no probability has moved; the code has |log r|, whose gradient there is the sign of
    rounding. The loss keeps its own clip, which the code leaves out. And log p is the engine's, not the present one.
    """
    return _with_row(samples, covariant(samples, share), NEAR_OLD, weight)


def covariant(samples: Sequence[Sample], share: float) -> list[npt.NDArray[np.bool_]]:
    """Returns [N] of each sample, whether each token is in that share of the optimizer step's tokens (rounded down).

    They are those with the largest (log p - mean log p) * (A - mean A) above 0, means over the step's tokens in policy.
    log p is the engine's, so that the choice is made before the first forward pass and is the same for every packing.
    A token without one is not chosen.
    """
    logprobs = np.concatenate([np.where(np.isnan(s.logprobs), s.raw_logprobs, s.logprobs) for s in samples])
    advantages = np.concatenate([sample.advantages for sample in samples])
    is_chosen = np.zeros(len(logprobs), dtype=bool)
    known = np.flatnonzero(~np.isnan(logprobs) & ~np.isnan(advantages))
    if count := int(share * len(known)):
        covariances = (logprobs[known] - logprobs[known].mean()) * (advantages[known] - advantages[known].mean())
        largest = np.argsort(-covariances, kind="stable")[:count]
        is_chosen[known[largest[covariances[largest] > 0]]] = True
    return np.split(is_chosen, np.cumsum([len(sample.targets) for sample in samples])[:-1])


def _with_row(
    samples: Sequence[Sample], chosen: Sequence[npt.NDArray[np.bool_]], row: int, value: float
) -> list[Sample]:
    """Returns the samples with `value` in that row of their chosen tokens' weights."""
    changed = []
    for sample, is_chosen in zip(samples, chosen, strict=True):
        weights = sample.weights.copy()
        weights[row, is_chosen] = value
        changed.append(replace(sample, weights=weights) if is_chosen.any() else sample)
    return changed
