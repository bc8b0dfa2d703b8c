"""How much one token counts in the loss of an update. Each takes the token's sample and the whole update's counts, so
that the sum over any packing of `share * value` is the same mean.
"""

from collections.abc import Callable
from typing import NamedTuple


class Counts(NamedTuple):
    """What one optimizer step trains on, counted before its first forward."""

    tokens: int
    samples: int
    trajectories: int


Share = Callable[[int, Counts], float]  # (trained tokens of the sample, counts of the update) -> weight of each token


def token_mean(num_tokens: int, update: Counts) -> float:
    """1 / (trained tokens of the update): every token the same. DAPO, arXiv:2503.14476, equation 12."""
    return 1.0 / update.tokens


def sample_mean(num_tokens: int, update: Counts) -> float:
    """1 / (samples of the update * trained tokens of this one): every sample the same. GSPO, equation 5."""
    return 1.0 / (update.samples * num_tokens)


def trajectory_sum(num_tokens: int, update: Counts, *, max_tokens: int) -> float:
    """1 / (trajectories of the update * max_tokens): sums over trajectories, one constant. Dr. GRPO, section 3.2."""
    return 1.0 / (update.trajectories * max_tokens)
