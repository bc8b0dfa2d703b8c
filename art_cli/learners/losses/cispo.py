"""CISPO: MiniMax-M1, 2025 (arXiv:2506.13585), equations 4 and 5.

The importance weight is clipped, not the update: every token keeps its gradient, by the policy gradient of its
log-likelihood, weighted with the clipped and detached ratio. The mean is over all tokens (`means.token_mean`).
"""

from torch import Tensor

from art_cli.learners.losses.objective import Objective


def cispo(new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor, *, clip: float, clip_high: float) -> Objective:
    """[N] -clip(r, 1 - clip, 1 + clip_high) A new, the clipped ratio detached. `samples` has no part in it.

    The value is not a distance from anything; its gradient is what counts. Clipped: where the ratio was cut.
    """
    ratio = (new - old).detach().exp()
    is_clipped = (ratio < 1 - clip) | (ratio > 1 + clip_high)
    return Objective(-ratio.clamp(1 - clip, 1 + clip_high) * advantages * new, is_clipped)
