"""Losses that a server of the Tinker protocol computes, and the numbers of each token for them. Numpy only.

A server's loss is the sum over tokens of a value that each token's numbers give. So credit, masks and the share of a
token in the mean are one number, which is sent as its advantage. All clipped objectives with a ratio of one
token are the server's `ppo` or `cispo` then. An objective with one ratio for a whole sample takes two passes: the first
gives the logprobs, from which the slope of the loss by each logprob follows, and the second sends that slope as the
weight of `cross_entropy`, whose gradient is the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.samples import Floats, Row, Sample
from art_cli.learners.step.step_samples import count


class TokenValues(NamedTuple):
    """The values of an objective for N tokens of one sample."""

    values: Floats  # [N] to be minimised
    slopes: Floats  # [N] the derivative of their sum by each logprob
    is_clipped: Floats  # [N] 1 where the clip holds the gradient back, else 0


class ServerLoss(NamedTuple):
    """The server's form of an objective. Example: ServerLoss("ppo", {"clip_low_threshold": 0.8, ...}, ...)"""

    name: str | None  # the server's loss, or None for two passes, because the ratio is a whole sample's
    settings: dict[str, float]
    values: Callable[[Floats, Floats, Floats], TokenValues]  # (new, old, advantages) of one sample's tokens


def server_loss(config: loss_config.LossConfig) -> ServerLoss:
    """Returns the server's form of a preset's objective. Presets without one are refused before (config/checks.py)."""
    low = high = getattr(config, "clip", 0.2)
    high = getattr(config, "clip_high", high)
    low = min(low, 1.0)  # a ratio is never negative, so a lower bound below 0 is none
    settings = {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}
    if isinstance(config, loss_config.CispoConfig):
        return ServerLoss("cispo", settings, lambda new, old, a: _cispo(new, old, a, low, high))
    if isinstance(config, loss_config.GspoConfig):
        return ServerLoss(None, {}, lambda new, old, a: _whole(new, old, a, low, high, np.mean))
    if isinstance(config, loss_config.RlooConfig):
        return ServerLoss(None, {}, lambda new, old, a: _whole(new, old, a, low, high, np.sum))
    return ServerLoss("ppo", settings, lambda new, old, a: _clipped(np.exp(new - old), a, low, high))


def _clipped(ratio: Floats, advantages: Floats, low: float, high: float) -> TokenValues:
    """Returns -min(r A, clip(r) A), equation 7 of PPO, as `clipped_surrogate` of algorithms/objectives.py does."""
    bounded = np.clip(ratio, 1 - low, 1 + high)
    is_clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    slopes = np.where(is_clipped, 0.0, -ratio * advantages)
    values = -np.minimum(ratio * advantages, bounded * advantages)
    return TokenValues(values, slopes, is_clipped.astype(np.float64))


def _whole(
    new: Floats, old: Floats, advantages: Floats, low: float, high: float, of_sample: Callable[[Floats], float]
) -> TokenValues:
    """Returns the same as `_clipped`, with one ratio exp(sum or mean of the tokens' new - old) for all of them."""
    found = _clipped(np.full(len(new), np.exp(of_sample(new - old))), advantages, low, high)
    each = 1.0 / len(new) if of_sample is np.mean else 1.0
    return found._replace(slopes=np.full(len(new), found.slopes.sum() * each))


def _cispo(new: Floats, old: Floats, advantages: Floats, low: float, high: float) -> TokenValues:
    """Returns -clip(r) A new, the clipped ratio a number, as `clip_weights` of algorithms/objectives.py does."""
    ratio = np.exp(new - old)
    factor = np.clip(ratio, 1 - low, 1 + high) * advantages
    is_clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return TokenValues(-factor * new, -factor, is_clipped.astype(np.float64))


class WeightedSample(NamedTuple):
    """One sample with the numbers of its N trained tokens as a server takes them."""

    sample: Sample
    advantages: Floats  # [N] advantage times share in the mean; NaN: not in policy
    imitation: Floats  # [N] weight times share in cross_entropy; NaN: not in it
    old: Floats  # [N] logprobs in nats of the policy that sampled; NaN: not known yet
    share: float  # the share of each of its policy tokens in the mean

    @property
    def in_policy(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return ~np.isnan(self.advantages)

    @property
    def is_unknown(self) -> bool:
        """True if the engine's logprobs of some policy tokens are not comparable."""
        return bool(np.isnan(self.old[self.in_policy]).any())

    def with_old(self, logprobs: Floats) -> "WeightedSample":
        """Returns the sample with these logprobs where none were known."""
        return self._replace(old=np.where(np.isnan(self.old), logprobs, self.old))


def weigh(
    samples: Sequence[Sample], algorithm: Algorithm, finished: FinishedCounts | None, *, mean_over: loss_config.MeanOver
) -> list[WeightedSample]:
    """Returns the samples of one optimizer step, with each token's share in the means over it.

    `finished` is the step's part of the finished trajectories, or None for that of its samples.
    """
    counts = count(samples, finished)
    found = []
    for sample in samples:
        share = _share(sample, Row.POLICY, counts, algorithm, mean_over)
        imitated = _share(sample, Row.CROSS_ENTROPY, counts, algorithm, mean_over)
        advantages, imitation = sample.weights[Row.POLICY], sample.weights[Row.CROSS_ENTROPY]
        found.append(
            WeightedSample(sample, _product(advantages, share), _product(imitation, imitated), sample.logprobs, share)
        )
    return found


def _product(weights: Floats, share: float) -> Floats:
    """Returns [N] weights times the share, rounded as in the torch learner's backward pass: both are float32 there."""
    return (weights.astype(np.float32) * np.float32(share)).astype(np.float64)


def _share(
    sample: Sample,
    component: Row,
    counts: Sequence[UpdateCounts],
    algorithm: Algorithm,
    mean_over: loss_config.MeanOver,
) -> float:
    num_tokens = sample.num_in(component)
    return algorithm.share(num_tokens, counts[component].over(mean_over)) if num_tokens else 0.0
