"""Shares: how much one token counts in the loss of an optimizer step.

Each function takes the number of trained tokens of the token's sample and the counts of the whole optimizer step. So
the sum of `share * value` over any packing is the same mean. `loss.mean_over` decides which trajectories are counted.
"""

from typing import Literal, NamedTuple


class FinishedCounts(NamedTuple):
    """Contents of the finished trajectories of a step, those of groups without signal too.

    Example: 4 trajectories of 3 sampled tokens each: FinishedCounts(tokens=12, samples=4, trajectories=4)
    """

    tokens: float  # sampled tokens that could be trained on, each once
    samples: float
    trajectories: float  # those with at least one such token

    def divided(self, parts: int) -> "FinishedCounts":
        """Returns the part of each of that many optimizer steps."""
        return FinishedCounts(*(value / parts for value in self))


class UpdateCounts(NamedTuple):
    """Counts of an optimizer step's training in one component of the loss, made before its first forward.

    `all` is the optimizer step's even part of what the whole step's finished trajectories hold. It does not depend on
    which of them have signal. In cross_entropy it is what is trained, because only a credit decides what is imitated.
    """

    tokens: float
    samples: float
    trajectories: float
    all: FinishedCounts

    def over(self, mean_over: Literal["trained", "all"]) -> "UpdateCounts":
        """Returns the counts as a share sees them: with `all`, tokens, samples and trajectories are those of
        `self.all`."""
        return self if mean_over == "trained" else UpdateCounts(*self.all, self.all)


def token_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (trained tokens of the update): all tokens count the same. DAPO, arXiv:2503.14476, equation 12."""
    return 1.0 / update.tokens


def sample_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (samples of the update * trained tokens of this one): all samples count the same. GSPO, equation
    5."""
    return 1.0 / (update.samples * num_tokens)


def trajectory_mean(num_tokens: int, update: UpdateCounts) -> float:
    """Returns 1 / (trajectories of the update * trained tokens of this sample): a sum over samples, a mean over
    trajectories.

    For an objective that gives each token the value of its whole sample. RLOO, arXiv:2402.14740, section 3.3.
    """
    return 1.0 / (update.trajectories * num_tokens)


def trajectory_sum(num_tokens: int, update: UpdateCounts, *, max_tokens: int) -> float:
    """Returns 1 / (trajectories of the update * max_tokens): sums over trajectories, one constant. Dr. GRPO, section
    3.2."""
    return 1.0 / (update.trajectories * max_tokens)
