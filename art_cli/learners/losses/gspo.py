"""GSPO: Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7.

The ratio belongs to a whole sequence: the geometric mean of its tokens' ratios, so that clipping takes or leaves a
sequence whole. A sequence is a sample; the mean is over the samples of the update (`means.sample_mean`).
"""

import torch
from torch import Tensor

from art_cli.learners.losses.objective import Objective, clipped_surrogate


def gspo(new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor, *, clip: float, clip_high: float) -> Objective:
    """[N] -min(s A, clip(s, 1 - clip, 1 + clip_high) A) with s = exp(mean over the sample's tokens of new - old)."""
    return clipped_surrogate(_sample_mean(new - old, samples).exp(), advantages, clip=clip, clip_high=clip_high)


def _sample_mean(values: Tensor, samples: Tensor) -> Tensor:
    """[N] each value replaced by the mean over its sample. No terms give no terms."""
    num_samples = int(samples.max()) + 1 if len(samples) else 0
    sums = values.new_zeros(num_samples).index_add(0, samples, values)
    counts = values.new_zeros(num_samples).index_add(0, samples, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[samples]
