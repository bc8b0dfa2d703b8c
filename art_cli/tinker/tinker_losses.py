"""Losses computed by a Tinker server, and the required numbers per token. Numpy only.

A server's loss is a sum of per-token values. We multiply credit, mask and mean share into a single number per token and
send it as the advantage. Clipped objectives with per-token ratios then map to the server's `ppo` or `cispo`. An
objective with a per-sample ratio takes two passes. The first pass returns logprobs, which determine the derivative of
the loss with respect to each logprob. The second pass sends these derivatives as `cross_entropy` weights; its gradient
is identical.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.algorithms.objectives import LARGEST
from art_cli.learners.samples import Floats, Row, Sample
from art_cli.learners.step.step_samples import count


class TokenValues(NamedTuple):
    """Objective values for N tokens of a sample."""

    values: Floats  # [N] values to minimize
    slopes: Floats  # [N] derivatives of the summed values with respect to each logprob
    is_clipped: Floats  # [N] 1 where clipping blocks the gradient, else 0


class ServerLoss(NamedTuple):
    """An objective in the server's terms. Example: ServerLoss("ppo", {"clip_low_threshold": 0.8, ...}, ...)"""

    name: str | None  # the server's loss; None for two passes (per-sample ratio)
    settings: dict[str, float]
    values: Callable[[Floats, Floats, Floats], TokenValues]  # (new, old, advantages) for a sample's tokens


def server_loss(config: loss_config.LossConfig) -> ServerLoss:
    """Returns a preset's objective in the server's terms. config/checks.py refuses other presets earlier."""
    low = high = getattr(config, "clip", 0.2)
    high = getattr(config, "clip_high", high)
    low = min(low, 1.0)  # ratios are never negative, so a lower bound below 0 has no effect
    settings = {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}
    if isinstance(config, loss_config.CispoConfig):
        return ServerLoss("cispo", settings, lambda new, old, a: _cispo(new, old, a, low, high))
    if isinstance(config, loss_config.GspoConfig):
        return ServerLoss(None, {}, lambda new, old, a: _whole(new, old, a, low, high, np.mean))
    if isinstance(config, loss_config.RlooConfig):
        return ServerLoss(None, {}, lambda new, old, a: _whole(new, old, a, low, high, np.sum))
    return ServerLoss("ppo", settings, lambda new, old, a: _clipped(np.exp(new - old), a, low, high))


def _clipped(ratio: Floats, advantages: Floats, low: float, high: float) -> TokenValues:
    """Returns -min(r A, clip(r) A), equation 7 of PPO, like `clipped_surrogate` in algorithms/objectives.py."""
    bounded = np.clip(ratio, 1 - low, 1 + high)
    is_clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    slopes = np.where(is_clipped, 0.0, -ratio * advantages)
    values = -np.minimum(ratio * advantages, bounded * advantages)
    return TokenValues(values, slopes, is_clipped.astype(np.float64))


def _whole(
    new: Floats, old: Floats, advantages: Floats, low: float, high: float, of_sample: Callable[[Floats], float]
) -> TokenValues:
    """Like `_clipped`, with a single ratio exp(sum or mean of new - old) for all tokens; no gradient past LARGEST."""
    moved = of_sample(new - old)
    ratio = np.exp(np.clip(moved, -LARGEST, LARGEST))
    found = _clipped(np.full(len(new), ratio), advantages, low, high)
    each = (1.0 / len(new) if of_sample is np.mean else 1.0) * (abs(moved) <= LARGEST)
    return found._replace(slopes=np.full(len(new), found.slopes.sum() * each))


def _cispo(new: Floats, old: Floats, advantages: Floats, low: float, high: float) -> TokenValues:
    """Returns -clip(r) A new with a constant ratio, like `clip_weights` in algorithms/objectives.py."""
    ratio = np.exp(new - old)
    factor = np.clip(ratio, 1 - low, 1 + high) * advantages
    is_clipped = (ratio < 1 - low) | (ratio > 1 + high)
    return TokenValues(-factor * new, -factor, is_clipped.astype(np.float64))


class WeightedSample(NamedTuple):
    """A sample with the server's numbers for N trained tokens."""

    sample: Sample
    advantages: Floats  # [N] advantage times mean share; NaN: not in policy
    imitation: Floats  # [N] weight times share in cross_entropy; NaN: not imitated
    old: Floats  # [N] logprobs in nats under the sampling policy; NaN: unknown so far
    share: float  # mean share per policy token

    @property
    def in_policy(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return ~np.isnan(self.advantages)

    @property
    def is_unknown(self) -> bool:
        """True if the engine's logprobs of some policy tokens are not comparable."""
        return bool(np.isnan(self.old[self.in_policy]).any())

    def with_old(self, logprobs: Floats) -> "WeightedSample":
        return self._replace(old=np.where(np.isnan(self.old), logprobs, self.old))


def weigh(
    samples: Sequence[Sample], algorithm: Algorithm, finished: FinishedCounts | None, *, mean_over: loss_config.MeanOver
) -> list[WeightedSample]:
    """Returns an optimizer step's weighted samples. `finished` are its trajectories, by default the samples' own."""
    counts = count(samples, finished)
    found = []
    for sample in samples:
        share = _share(sample, Row.POLICY, counts, algorithm, mean_over)
        imitated = _share(sample, Row.CROSS_ENTROPY, counts, algorithm, mean_over)
        advantages, imitation = sample.weights[Row.POLICY], sample.weights[Row.CROSS_ENTROPY]
        old = np.full(len(advantages), np.nan) if algorithm.has_sample_ratio else sample.logprobs
        found.append(WeightedSample(sample, _product(advantages, share), _product(imitation, imitated), old, share))
    return found


def _product(weights: Floats, share: float) -> Floats:
    """Returns [N] weights times share, rounded like the torch learner's backward pass: both factors are float32."""
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
