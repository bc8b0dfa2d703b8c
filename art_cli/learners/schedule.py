"""An optimizer's schedule: learning rate by step, and gradient norm limit. Numbers only."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from art_cli.config.schema import SftConfig, TrainConfig

EPS = 1e-8  # torch's default for AdamW
WINDOW = 32  # past norms in the clipping median: long enough to outlast a burst, short enough to follow the trend
# of sft and train
SHARED_SETTINGS = ("learning_rate", "warmup_steps", "decay", "decay_to", "weight_decay", "max_grad_norm")
MIN_NORMS = 4  # minimum number of past norms for a reliable median


def rate_of_step(config: TrainConfig, done: int) -> float:
    """Returns the learning rate after `done` steps. It rises linearly over `warmup_steps`, starting above zero.

    Then it decays toward `decay_to`, which it would reach at step `steps`, so the last step's rate is above zero.
    """
    if done < config.warmup_steps:
        return config.rate * (done + 1) / config.warmup_steps
    progress = min(1.0, (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return config.rate * decayed(config.decay, progress, to=config.decay_to)


def warm_up_settings(config: SftConfig, num_updates: int) -> TrainConfig:
    """Returns the optimizer settings for a warm-up with `num_updates` steps. The rest keeps `train`'s defaults."""
    return TrainConfig(steps=num_updates, **{name: getattr(config, name) for name in SHARED_SETTINGS})


def clip_limit(config: TrainConfig, norms: Sequence[float]) -> float:
    """Returns the next gradient's norm limit: `max_grad_norm`, or a multiple of the past norms' median if lower.

    AutoClip (Seetharaman et al. 2020, arXiv:2007.14469) clips at a quantile of past gradient norms before clipping.
    Here the quantile is multiplied by a factor and covers a window, because norms change while a policy learns.
    """
    factor = config.clip_to_history
    median = statistics.median(norms) if len(norms) >= MIN_NORMS else 0.0
    if factor is None or median == 0:
        return config.max_grad_norm
    return min(config.max_grad_norm, factor * median)


def decayed(shape: Literal["none", "linear", "cosine"], progress: float, *, to: float) -> float:
    """Returns the learning rate factor at this share of the decay, falling from 1 to `to`.

    Cosine: SGDR, Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5, without restarts.
    """
    if shape == "none":
        return 1.0
    left = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return to + (1 - to) * left
