"""Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.

GRPO without its two biases: advantages are not divided by the group's deviation, and the sum over a trajectory's
tokens is divided by a constant (`means.trajectory_sum`), so that a token weighs the same in a long and a short one.
"""

from torch import Tensor

from art_cli.learners.losses.objective import Objective, clipped_surrogate


def dr_grpo(new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor, *, clip: float) -> Objective:
    """[N] -min(r A, clip(r, 1 - clip, 1 + clip) A) with r = exp(new - old) of each token; `samples` has no part."""
    return clipped_surrogate((new - old).exp(), advantages, clip=clip, clip_high=clip)
