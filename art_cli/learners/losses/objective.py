"""What every loss gives for each term, and PPO's clipped surrogate, which GRPO, Dr. GRPO, DAPO and GSPO share."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Objective(NamedTuple):
    """[N] terms: what each adds to the loss before its share."""

    values: Tensor  # [N] to be minimised
    is_clipped: Tensor  # [N] bool: the clip is active


class ObjectiveFunction(Protocol):
    def __call__(self, new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor) -> Objective:
        """new, old: [N] logprobs under the current weights and under those that sampled; samples: [N] index."""
        ...


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip: float, clip_high: float) -> Objective:
    """[N] -min(r A, clip(r, 1 - clip, 1 + clip_high) A), and where the clip holds the gradient back.

    PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; the two bounds apart are DAPO's clip-higher.

    ratio 1.5, A = 1,  clip 0.2 -> -1.2, clipped (no gradient)
    ratio 1.5, A = -1, clip 0.2 ->  1.5, not clipped (it still pushes the ratio down)
    """
    bounded = ratio.clamp(1 - clip, 1 + clip_high)
    values = -torch.minimum(ratio * advantages, bounded * advantages)
    is_clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))
    return Objective(values, is_clipped)
