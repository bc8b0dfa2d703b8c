"""The schedule of an optimizer: the learning rate of each step, and the norm that a gradient may have. Numbers only."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from art_cli.config.schema import SftConfig, TrainConfig

EPS = 1e-8  # AdamW's, as torch has it by default
WINDOW = 32  # number of past norms whose median clips: long enough to outlast a burst, short enough to follow the trend
MIN_NORMS = 4  # least number of past norms that have a median to trust


def rate_of_step(config: TrainConfig, done: int) -> float:
    """Returns the learning rate after `done` steps. It grows evenly over `warmup_steps`; the first step's is not zero.

    Then it decays, so that it would reach its end at step `steps`; the last step's is not zero.
    """
    if done < config.warmup_steps:
        return config.rate * (done + 1) / config.warmup_steps
    progress = min(1.0, (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return config.rate * decayed(config.decay, progress, to=config.decay_to)


def warm_up_settings(config: SftConfig, num_updates: int) -> TrainConfig:
    """Returns the optimizer's settings of a warm-up of that many updates, with `train`'s defaults for the rest."""
    return TrainConfig(
        steps=num_updates,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay=config.decay,
        decay_to=config.decay_to,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def clip_limit(config: TrainConfig, norms: Sequence[float]) -> float:
    """Returns the norm that the next gradient may have: `max_grad_norm`, or a multiple of the median of those before.

    As AutoClip, Seetharaman et al. 2020 (arXiv:2007.14469), it is a quantile of the gradients' own norms before
    clipping; here times a factor, and over a window, because norms change while a policy learns.
    """
    factor = config.clip_to_history
    median = statistics.median(norms) if len(norms) >= MIN_NORMS else 0.0
    if factor is None or median == 0:
        return config.max_grad_norm
    return min(config.max_grad_norm, factor * median)


def decayed(shape: Literal["none", "linear", "cosine"], progress: float, *, to: float) -> float:
    """Returns the factor of the learning rate at a share of its decay: 1 at its start, `to` at its end.

    Cosine: SGDR, Loshchilov and Hutter 2017 (arXiv:1608.03983), equation 5, without restarts.
    """
    if shape == "none":
        return 1.0
    left = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return to + (1 - to) * left
