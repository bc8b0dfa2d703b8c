"""ReplicaRanks: processes that hold a whole model each and share the samples of a pass.

Each runs its own packs, and the gradients are added up over all of them once, after the last pack. A base that every
process holds whole costs more memory than a divided one (sharding.py), and any number of adapters can stand on it.
"""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from art_cli.learners import exchange
from art_cli.learners.ranks import Ranks

Value = TypeVar("Value")


class ReplicaRanks(Ranks):
    """One process of a process group, which exists already."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        return exchange.gather(value, kind, self.size)

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)
