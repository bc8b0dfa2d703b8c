"""Ranks: the processes that share a learner's work. This base class describes a single process.

Every learner process holds the whole batch and computes the same plan, but runs only its assigned packs. All layers in
all passes are collectives, so every process must run the same number of passes. A process without a pack left runs an
idle pack.

processes/group_ranks.py implements ranks for several processes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.packing import PACK_COST, Pack, Terms, pack_samples
from art_cli.learners.samples import Row, Sample, bare_sample

Value = TypeVar("Value")


class Ranks:
    """This process's rank in its learner; here the learner has only one process.

    All processes must call `gather`, `forward`, `add_up` and `whole` in the same order.
    """

    rank, size = 0, 1

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        """Returns all processes' values (records of type `kind`), by rank."""
        return [value]

    def forward(self, model: Any, run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
        """Returns `run(pack)`, which calls parts of the model, as one forward pass of the model."""
        return run(pack)

    def add_up(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all processes."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the whole tensor from this process's part."""
        return tensor

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns whole tensors on rank 0's CPU, gathered one at a time; {} on all other ranks."""
        collected: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = self.whole(tensor.detach())
            if self.rank == 0:
                collected[name] = whole.cpu().contiguous()
        return collected

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Returns this process's part of a whole tensor, with the device and sharding of `like`."""
        return tensor.to(like.device)


def pack_evenly(samples: Sequence[Sample], size: int, *, budget: int, share: bool) -> list[Pack]:
    """Returns packs of at most `budget` tokens, or smaller packs if `size` processes finish them sooner."""
    packs = pack_samples(samples, budget=budget, share=share)
    if len(packs) % size == 0:
        return packs
    num_packs = len(packs) + -len(packs) % size
    even = min(budget, -(-sum(len(pack.token_ids) for pack in packs) // num_packs))
    smaller = pack_samples(samples, budget=even, share=share)
    return min(packs, smaller, key=lambda packs: _duration(packs, size))


def deal(packs: Sequence[Pack], rank: int, size: int) -> list[Pack]:
    """Returns the packs for process `rank` of `size`. Idle packs equalize the number of packs per process.

    Processes wait for each other in every pass, so packs of similar length run in the same pass.
    """
    if size == 1 or not packs:
        return list(packs)
    mine = _longest_first(packs)[rank::size]
    num_passes = -(-len(packs) // size)
    return [*mine, *[_idle(packs[0])] * (num_passes - len(mine))]


def _duration(packs: Sequence[Pack], size: int) -> int:
    """Returns an update's duration in tokens. Each pass takes as long as its longest pack."""
    return sum(len(pack.token_ids) + PACK_COST for pack in _longest_first(packs)[::size])


def _longest_first(packs: Sequence[Pack]) -> list[Pack]:
    return sorted(packs, key=lambda pack: -len(pack.token_ids))


def _idle(pack: Pack) -> Pack:
    """Returns a pack of two tokens without terms, so loss and gradient are zero."""
    [short] = pack_samples([bare_sample(pack.token_ids[:2], np.array([1]), "idle")], budget=2)
    floats, ints, weights = np.empty(0), np.empty(0, dtype=np.int64), np.empty((len(Row), 0))
    nothing = Terms(edges=ints, samples=ints, weights=weights, logprobs=floats, raw_logprobs=floats)
    return replace(short, terms=nothing, samples=[])
