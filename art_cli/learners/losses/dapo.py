"""DAPO: Yu et al. 2025 (arXiv:2503.14476), equations 8 to 13.

Clip-higher (equation 10), the mean over all tokens (equation 12, `means.token_mean`), and a soft punishment of replies
that come near the length limit (equation 13), which changes rewards and so comes before advantages. Its dynamic
sampling is what contract 4 does to groups without signal.
"""

from torch import Tensor

from art_cli.learners.losses.objective import Objective, clipped_surrogate


def dapo(new: Tensor, old: Tensor, advantages: Tensor, samples: Tensor, *, clip: float, clip_high: float) -> Objective:
    """[N] -min(r A, clip(r, 1 - clip, 1 + clip_high) A) with r = exp(new - old). `samples` has no part in it."""
    return clipped_surrogate((new - old).exp(), advantages, clip=clip, clip_high=clip_high)


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """What a reply of that length adds to its reward: 0 up to max - buffer, then falling evenly to -1 at max.

    Equation 13. At max 100, buffer 20: 80 tokens 0, 90 tokens -0.5, 100 tokens and above -1.
    """
    free = max_tokens - min(buffer, max_tokens)
    return max(-1.0, min(0.0, (free - num_tokens) / (max_tokens - free)))
