"""Token losses: the losses that a client names and weighs itself. Tensors in, tensors out.

Each gives a value for every token, and the loss is their sum: means, masks and the like are in the client's weights.
The names and the numbers that they take are those of the Tinker protocol.

    cross_entropy        -w log p
    importance_sampling  -r A                                r = exp(log p - log q), q the policy that sampled
    ppo                  -min(r A, clip(r, low, high) A)     Schulman et al. 2017 (arXiv:1707.06347), equation 7
    cispo                -sg[clip(r, low, high)] A log p     CISPO (arXiv:2506.13585), equations 4 and 5
    dro                  -A log p + beta/2 (log p - log q)^2 DRO (arXiv:2405.19107), equation 4 with a given advantage
    gspo                 ppo with one r for a whole datum: the geometric mean of its tokens' (arXiv:2507.18071)
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from art_cli.learners.algorithms.objectives import Objective, clipped_surrogate

SHARES = "shares"  # name of numbers that any datum may bring: factors of each token's value; 1 where there are none
Numbers = Mapping[str, Tensor]  # [N] by name, or a scalar for the whole request


class TokenLoss(NamedTuple):
    """One loss by name."""

    values: Callable[[Tensor, Numbers, Tensor], Objective]  # (log p [N], numbers, datum of each term [N])
    needs: tuple[str, ...]  # numbers that every datum brings
    takes: Mapping[
        str, float | None
    ]  # settings with their default, or None if it must be given. A datum may bring them too
    may_bring: tuple[str, ...] = ()  # further numbers that a datum may bring


def _cross_entropy(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    return Objective(-numbers["weights"] * new)


def _importance_sampling(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    return Objective(-_ratio(new, numbers) * numbers["advantages"])


def _ppo(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    return _clipped(_ratio(new, numbers), numbers)


def _cispo(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    ratio, low, high = _ratio(new, numbers).detach(), *_bounds(new, numbers)
    clipped = torch.minimum(torch.maximum(ratio, low), high)
    return Objective(-clipped * numbers["advantages"] * new, (ratio < low) | (ratio > high))


def _dro(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    return Objective(-numbers["advantages"] * new + numbers["beta"] / 2 * (new - numbers["logprobs"]).square())


def _gspo(new: Tensor, numbers: Numbers, datums: Tensor) -> Objective:
    mask = numbers.get("sequence_ratio_mask")
    counted = ((numbers["advantages"] if mask is None else mask) != 0).to(new.dtype)
    _, places = torch.unique(datums, return_inverse=True)
    sums = torch.zeros_like(new).index_add(0, places, counted * (new - numbers["logprobs"]))
    sizes = torch.zeros_like(new).index_add(0, places, counted).clamp(min=1)
    return _clipped((sums / sizes)[places].exp(), numbers)


def _clipped(ratio: Tensor, numbers: Numbers) -> Objective:
    low, high = _bounds(ratio, numbers)
    if low.ndim == high.ndim == 0:
        return clipped_surrogate(ratio, numbers["advantages"], 1 - float(low), float(high) - 1)
    advantages = numbers["advantages"]
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    is_clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return Objective(-torch.minimum(ratio * advantages, bounded * advantages), is_clipped)


def _ratio(new: Tensor, numbers: Numbers) -> Tensor:
    return (new - numbers["logprobs"]).exp()


def _bounds(like: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor]:
    low, high = numbers["clip_low_threshold"], numbers["clip_high_threshold"]
    return low.to(like.device), high.to(like.device)


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
TOKEN_LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(_cross_entropy, (), {"weights": 1.0}),
    "importance_sampling": TokenLoss(_importance_sampling, _SAMPLED, {}),
    "ppo": TokenLoss(_ppo, _SAMPLED, _CLIP),
    "cispo": TokenLoss(_cispo, _SAMPLED, _CLIP),
    "dro": TokenLoss(_dro, _SAMPLED, {"beta": None}),
    "gspo": TokenLoss(_gspo, _SAMPLED, _CLIP, ("sequence_ratio_mask",)),
}
