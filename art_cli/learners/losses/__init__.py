"""Losses: pure functions of logprobs and advantages, one per file, with paper and equation.

    objective   [N] terms -> what each adds to the loss, before its share         grpo dr_grpo dapo gspo cispo
    share       how much a term of a sample counts, from the whole update's counts           means.py
    besides     the KL to the reference (kl.py) and truncated importance weights (importance.py), with any of them

Tensors and numbers in, tensors out, float32 whatever the model is. N terms: one per trained token of each sample of a
pack; terms that share an edge of the prefix tree have the same `new`. All terms of a sample are in one call.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from art_cli.config import schema
from art_cli.learners.losses.cispo import cispo
from art_cli.learners.losses.dapo import dapo
from art_cli.learners.losses.dr_grpo import dr_grpo
from art_cli.learners.losses.grpo import grpo
from art_cli.learners.losses.gspo import gspo
from art_cli.learners.losses.kl import k3
from art_cli.learners.losses.means import Share, sample_mean, token_mean, trajectory_sum
from art_cli.learners.losses.objective import ObjectiveFunction


class Loss(NamedTuple):
    """A loss of the configuration: its objective with its knobs bound, and its mean."""

    objective: ObjectiveFunction
    share: Share


class LossTerms(NamedTuple):
    """The terms of one pack, as tensors of [N] float32."""

    new: Tensor  # carries the gradient
    old: Tensor
    advantages: Tensor
    samples: Tensor  # int64: which sample of the pack
    shares: Tensor
    importance: Tensor | None = None  # truncated importance weights
    reference: Tensor | None = None  # logprobs under the reference policy


class PackLoss(NamedTuple):
    loss: Tensor  # scalar: this pack's part of the update's loss
    parts: Tensor  # [N] the loss of each term, detached; their sum is `loss`
    is_clipped: Tensor  # [N]
    kl: Tensor | None  # [N] k3 of each term, detached


def pack_loss(objective: ObjectiveFunction, terms: LossTerms, *, kl: float = 0.0) -> PackLoss:
    """Sum over terms of share * (importance * objective + kl * k3). A pack without terms adds zero."""
    values, is_clipped = objective(terms.new, terms.old, terms.advantages, terms.samples)
    if terms.importance is not None:
        values = values * terms.importance
    divergence = None
    if terms.reference is not None:
        divergence = k3(terms.new, terms.reference)
        values = values + kl * divergence
    parts = values * terms.shares
    return PackLoss(parts.sum(), parts.detach(), is_clipped, None if divergence is None else divergence.detach())


def build_loss(config: schema.LossConfig, *, max_tokens: int) -> Loss:
    """The loss a configuration names. `max_tokens`: of one reply, for Dr. GRPO's constant where it has none."""
    match config:
        case schema.GrpoConfig():
            return Loss(partial(grpo, clip=config.clip), token_mean)
        case schema.DrGrpoConfig():
            constant = config.max_tokens or max_tokens
            return Loss(partial(dr_grpo, clip=config.clip), partial(trajectory_sum, max_tokens=constant))
        case schema.DapoConfig():
            return Loss(partial(dapo, clip=config.clip, clip_high=config.clip_high), token_mean)
        case schema.GspoConfig():
            return Loss(partial(gspo, clip=config.clip, clip_high=config.clip_high), sample_mean)
        case schema.CispoConfig():
            return Loss(partial(cispo, clip=config.clip, clip_high=config.clip_high), token_mean)
