"""GRPO: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), equation 3.

Each token's ratio to the policy that sampled it, PPO's clip around it, advantages relative to the group. The mean is
over all trained tokens of the update (`means.token_mean`), where the paper's is over each sequence first: that one
favours short right answers and long wrong ones (Dr. GRPO, arXiv:2503.20783, section 3.1).
"""

from torch import Tensor

from art_cli.learners.losses.objective import Objective, clipped_surrogate


def grpo(new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor, *, clip: float) -> Objective:
    """[N] -min(r A, clip(r, 1 - clip, 1 + clip) A) with r = exp(new - old) of each token; `samples` has no part."""
    return clipped_surrogate((new - old).exp(), advantages, clip=clip, clip_high=clip)
