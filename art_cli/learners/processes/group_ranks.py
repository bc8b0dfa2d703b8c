"""GroupRanks: a learner's processes as a torch.distributed group.

With plain GroupRanks every process holds the whole model and runs its assigned packs; gradients are summed across
processes once, after the last pack. A sharded model (FsdpRanks in worker.py) takes less memory but cannot carry several
adapters.
"""

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.processes.wire_records import decode, encode
from art_cli.runtime.errors import LearnerError

Value = TypeVar("Value")

MAX_BYTES = 2**31  # maximum record size


class GroupRanks(Ranks):
    """One process in an existing process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        return gather(value, kind, self.size)

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


def gather(value: Value, kind: type[Value], size: int) -> list[Value]:
    """Returns the records of all `size` processes, which all call it. Raises LearnerError for an invalid record."""
    written = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [int(each) for each in _gather(torch.tensor([len(written)]), size)]
    if not all(0 < each <= MAX_BYTES for each in sizes):
        raise LearnerError(f"the learner's processes sent records of impossible sizes: {sizes}")
    padded = torch.nn.functional.pad(written, (0, max(sizes) - len(written)))
    parts = zip(_gather(padded, size), sizes, strict=True)
    try:
        return [decode(part[:length].numpy().tobytes(), kind) for part, length in parts]
    except ValueError as error:
        raise LearnerError(f"a process of the learner sent an invalid record: {error}") from error


def _gather(tensor: Tensor, size: int) -> list[Tensor]:
    """Returns all processes' tensors on the CPU. The shapes must be equal."""
    tensors = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(tensors, tensor)
    return tensors


def join(device: torch.device, deadline_s: float) -> None:
    """Joins the process group started by torchrun. `deadline_s` is the longest wait in a collective."""
    if not dist.is_initialized():
        backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=timedelta(seconds=deadline_s))


def device_of(name: str) -> torch.device:
    """Returns the CPU (shared by all processes) or this process's GPU. Raises LearnerError if GPUs are missing."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    size, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    first = int(name.partition(":")[2] or 0)
    if gpus < first + size:
        start = f" from {name} on" if first else ""
        raise LearnerError(
            f"learner.processes is {size}, but there are only {gpus - first} GPUs{start}, one per process"
        )
    device = torch.device("cuda", first + int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
