"""Shares: one token's factor in an optimizer step's loss.

Each function takes the number of trained tokens in the token's sample and the counts of the whole optimizer step, so
that the sum of `share * value` is the same for any packing. `loss.mean_over` selects the trajectories to count.
"""

from typing import Literal, NamedTuple


class FinishedCounts(NamedTuple):
    """Counts over a step's finished trajectories, including groups without signal.

    Example: 4 trajectories of 3 sampled tokens each: FinishedCounts(tokens=12, samples=4, trajectories=4)
    """

    tokens: float  # trainable sampled tokens, each counted once
    samples: float
    trajectories: float  # trajectories with at least one trainable token

    def divided(self, parts: int) -> "FinishedCounts":
        """Returns the even part for one of `parts` optimizer steps."""
        return FinishedCounts(*(value / parts for value in self))


class UpdateCounts(NamedTuple):
    """Counts for one loss component in an optimizer step, computed before any forward pass.

    `all` is the optimizer step's even part of the counts over the policy step's finished trajectories, whether or not
    they have signal. In cross_entropy it equals the trained counts, because only credit decides which tokens are
    imitated.
    """

    tokens: float
    samples: float
    trajectories: float
    all: FinishedCounts

    def over(self, mean_over: Literal["trained", "all"]) -> "UpdateCounts":
        """Returns the counts for computing shares. `all` replaces tokens, samples and trajectories by `self.all`."""
        return self if mean_over == "trained" else UpdateCounts(*self.all, self.all)


def token_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (the update's trained tokens): all tokens count the same. DAPO, arXiv:2503.14476, equation 12."""
    return 1.0 / update.tokens


def sample_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (the update's samples * this sample's trained tokens): all samples count the same. GSPO, eq. 5."""
    return 1.0 / (update.samples * num_tokens)


def trajectory_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (the update's trajectories * this sample's trained tokens).

    It gives a sum over samples and a mean over trajectories, for objectives that give each token the value of the whole
    sample. RLOO, arXiv:2402.14740, section 3.3.
    """
    return 1.0 / (update.trajectories * num_tokens)


def trajectory_sum(num_tokens: int, update: UpdateCounts, *, max_tokens: int) -> float:
    """Returns 1 / (the update's trajectories * max_tokens): sums divided by one constant. Dr. GRPO, section 3.2."""
    return 1.0 / (update.trajectories * max_tokens)
