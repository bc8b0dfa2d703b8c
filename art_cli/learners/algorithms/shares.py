"""Shares: how much one token counts in the loss of an optimizer step.

Each function takes the number of trained tokens of the token's sample and the counts of the whole optimizer step. So
the sum of `share * value` over any packing is the same mean.
"""

from typing import NamedTuple


class UpdateCounts(NamedTuple):
    """What one optimizer step trains on in one component of the loss, counted before its first forward."""

    tokens: int
    samples: int
    trajectories: int


def token_mean(num_tokens: int, update: UpdateCounts) -> float:
    """1 / (trained tokens of the update): all tokens count the same. DAPO, arXiv:2503.14476, equation 12."""
    return 1.0 / update.tokens


def sample_mean(num_tokens: int, update: UpdateCounts) -> float:
    """1 / (samples of the update * trained tokens of this one): all samples count the same. GSPO, equation 5."""
    return 1.0 / (update.samples * num_tokens)


def trajectory_sum(num_tokens: int, update: UpdateCounts, *, max_tokens: int) -> float:
    """1 / (trajectories of the update * max_tokens): sums over trajectories, one constant. Dr. GRPO, section 3.2."""
    return 1.0 / (update.trajectories * max_tokens)
