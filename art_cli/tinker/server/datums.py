"""Datums: token sequences with client-provided loss weights; token losses; and packs to compute them.

A datum's rows are already shifted by one: the targets in row i are predicted from inputs 0 to i. A row has K targets,
usually one. Targets may differ from the next input, because clients may query any token.

    inputs 5 6 7    targets 6 7 8    the sequence 5 6 7 8, trained on its last three tokens
    inputs 5 6 7    targets 6 9 8    9 is predicted after 5 6, although 7 follows in the inputs

Clients may omit rows. The packs then equal the torch learner's packs, whose prompts are also untrained, and sums over
them are identical bit for bit.

A TokenLoss computes a tensor of values, one per token. The loss is their sum. Clients put means and masks into the
weights. Loss names and inputs follow the Tinker protocol.

    cross_entropy        -w log p
    importance_sampling  -r A                                r = exp(log p - log q), q the sampling policy
    ppo                  -min(r A, clip(r, low, high) A)     Schulman et al. 2017 (arXiv:1707.06347), equation 7
    cispo                -sg[clip(r, low, high)] A log p     CISPO (arXiv:2506.13585), equations 4 and 5
    dro                  -A log p + beta/2 (log p - log q)^2 DRO (arXiv:2405.19107), equation 4 with a given advantage
    gspo                 ppo with r per datum: the geometric mean of its tokens' ratios (arXiv:2507.18071)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from art_cli.learners.algorithms.objectives import Objective, clipped_surrogate
from art_cli.learners.packs.packing import Edges, Pack
from art_cli.learners.samples import Floats, Ints, Sample, bare_sample

SHARES = "shares"  # optional input of any datum: a factor for each token's loss value (default 1)
Numbers = Mapping[str, Tensor]  # [N] by name, or a scalar for the request
_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class TokenLoss(NamedTuple):
    values: Callable[[Tensor, Numbers, Tensor], Objective]  # (log p [N], numbers, datum of each term [N])
    needs: tuple[str, ...]  # required datum inputs
    # settings with defaults; None if required. A datum may override them per token
    takes: Mapping[str, float | None]
    may_bring: tuple[str, ...] = ()  # optional datum inputs


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


TOKEN_LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(lambda new, numbers, _: Objective(-numbers["weights"] * new), (), {"weights": 1.0}),
    "importance_sampling": TokenLoss(
        lambda new, numbers, _: Objective(-_ratio(new, numbers) * numbers["advantages"]), _SAMPLED, {}
    ),
    "ppo": TokenLoss(lambda new, numbers, _: _clipped(_ratio(new, numbers), numbers), _SAMPLED, _CLIP),
    "cispo": TokenLoss(_cispo, _SAMPLED, _CLIP),
    "dro": TokenLoss(_dro, _SAMPLED, {"beta": None}),
    "gspo": TokenLoss(_gspo, _SAMPLED, _CLIP, ("sequence_ratio_mask",)),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Datum:
    """A sequence of n rows with K targets per row.

    Example: Datum(inputs=[5 6 7], targets=[[6] [7] [8]], numbers={"weights": [[0.0] [1.0] [1.0]]})
    """

    inputs: Ints  # [n] token ids
    targets: Ints  # [n, K] token ids
    numbers: Mapping[str, Floats]  # [n, K] the loss inputs by name: weights, advantages, logprobs
    rows: Ints | None = None  # [m] computed rows, ascending, at least one; None for all rows

    @property
    def computed(self) -> Ints:
        """[m] indices of the computed rows."""
        return np.arange(len(self.inputs)) if self.rows is None else self.rows

    def numbers_of(self, name: str) -> Floats:
        """Returns [m * K] the named numbers in computed rows."""
        return (self.numbers[name] if self.rows is None else self.numbers[name][self.rows]).ravel()

    @property
    def num_terms(self) -> int:
        return self.targets.size if self.rows is None else self.targets.shape[1] * len(self.rows)

    def whole(self, values: Floats) -> Floats:
        """Returns [n, K] values for all rows; skipped rows have 0."""
        if self.rows is None:
            return values.reshape(self.targets.shape)
        found = np.zeros(self.targets.shape, values.dtype)
        found[self.rows] = values.reshape(len(self.rows), -1)
        return found


class DatumPack(NamedTuple):
    """A pack and its N terms, ordered by datum, then row."""

    pack: Pack
    edge_of: Ints  # [N] index of the predicting edge
    datum_of: Ints  # [N] index of the term's datum in the request
    order: list[int]  # indices of the pack's datums, in term order


def datum_samples(data: Sequence[Datum]) -> list[Sample]:
    """Returns the datums as samples for packing. The last token only makes room for the last row's prediction."""
    return [
        bare_sample(
            np.concatenate([datum.inputs, datum.targets[-1, :1]]),
            datum.computed + 1,
            f"datum {number}",
            turn=number,
        )
        for number, datum in enumerate(data)
    ]


def ask_for_targets(pack: Pack, data: Sequence[Datum]) -> DatumPack:
    """Returns the pack from `datum_samples` with edges for the datums' targets instead of the next tokens."""
    order = [sample.turn for sample in pack.samples]
    if all(_asks_for_next(data[sample.turn], sample) for sample in pack.samples):
        return DatumPack(pack, pack.terms.edges, np.array(order)[pack.terms.samples], order)
    repeats = np.concatenate([np.full(len(data[index].computed), data[index].targets.shape[1]) for index in order])
    places = np.repeat(pack.edges.positions[pack.terms.edges], repeats)
    targets = np.concatenate([data[index].targets[data[index].computed].ravel() for index in order])
    both, edge_of = np.unique(np.stack([places, targets]), axis=1, return_inverse=True)
    edges = Edges(both[0].copy(), both[1].copy(), np.ones(both.shape[1]))
    datum_of = np.concatenate([np.full(data[index].num_terms, index) for index in order])
    return DatumPack(replace(pack, edges=edges), edge_of.ravel(), datum_of, order)


def _asks_for_next(datum: Datum, sample: Sample) -> bool:
    """Returns True if each computed row has a single target, the next token in the sample."""
    rows = sample.targets - 1
    return datum.targets.shape[1] == 1 and bool((datum.targets[rows, 0] == sample.token_ids[sample.targets]).all())
