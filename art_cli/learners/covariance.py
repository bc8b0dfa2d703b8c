"""Clip-Cov: the tokens that would take most of the policy's entropy away are left out of an update. Numpy only."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from art_cli.learners.samples import Sample
from art_cli.learners.token_weights import POLICY


def without_covariant(samples: Sequence[Sample], share: float) -> list[Sample]:
    """The samples of an optimizer step, with advantage 0 for that share of its tokens (rounded down).

    They are those with the largest (log p - mean log p) * (A - mean A) above 0, means over the step's tokens in policy.
    log p is the engine's, so that the choice is made before the first forward pass and is the same for every packing.
    A token without one is not chosen. The tokens still count in the mean.

    Clip-Cov: Cui et al. 2025 (arXiv:2505.22617), section 4.2, which takes the gradient of tokens of high covariance
    away. It draws them at random between two bounds; the largest ones are what its KL-Cov takes.
    """
    logprobs = np.concatenate([np.where(np.isnan(s.logprobs), s.raw_logprobs, s.logprobs) for s in samples])
    advantages = np.concatenate([sample.advantages for sample in samples])
    known = np.flatnonzero(~np.isnan(logprobs) & ~np.isnan(advantages))
    count = int(share * len(known))
    if count == 0:
        return list(samples)
    covariances = (logprobs[known] - logprobs[known].mean()) * (advantages[known] - advantages[known].mean())
    largest = np.argsort(-covariances, kind="stable")[:count]
    is_chosen = np.zeros(len(logprobs), dtype=bool)
    is_chosen[known[largest[covariances[largest] > 0]]] = True
    parts = np.split(is_chosen, np.cumsum([len(sample.targets) for sample in samples])[:-1])
    return [_without(sample, part) for sample, part in zip(samples, parts, strict=True)]


def _without(sample: Sample, is_chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Sample:
    weights = sample.weights.copy()
    weights[POLICY, is_chosen] = 0.0
    return replace(sample, weights=weights)
