"""A trust region: an update that moves the policy too far is drawn back toward the weights before it."""

import math
from typing import NamedTuple

from torch import Tensor

from art_cli.learners.gradient import LossGradient, Update
from art_cli.learners.optimizer import Optimizer

MAX_HALVINGS = 5  # KL grows with the square of a small step, so that five halvings leave about a thousandth of it


class Held(NamedTuple):
    """The distance that the policy has moved. Example: Held(kl=0.004, share=0.5)"""

    kl: float  # KL(before the step || now) in nats per token, over the tokens of the update; NaN: it has none
    share: float  # share of the update that was kept; 1: it was within the bound


def hold(
    gradient: LossGradient,
    optimizer: Optimizer,
    update: Update,
    before: dict[str, Tensor],
    *,
    max_kl: float,
) -> Held:
    """Halves the distance to the weights `before` the update until the policy is within `max_kl` of the step's start.

    If five halvings are not enough, the update is taken back whole. The update has its packs' logprobs at the step's
    start. Cost: one forward pass, and one for each halving. The bound is TRPO's, Schulman et al. 2015
    (arXiv:1502.05477), equation 12, and so is the search back along the step; here the step is AdamW's.
    """
    share = 1.0
    while not _is_within(kl := gradient.divergence(update), max_kl):
        if share == 0:
            break
        halves = share > 0.5**MAX_HALVINGS
        optimizer.draw_back(before, 0.5 if halves else 1.0)
        share = share / 2 if halves else 0.0
    return Held(kl, share)


def _is_within(kl: float, bound: float) -> bool:
    """Returns whether the KL is within the bound, as NaN is, which is one over no tokens."""
    return math.isnan(kl) or kl <= bound
