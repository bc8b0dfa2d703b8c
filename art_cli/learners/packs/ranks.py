"""Ranks: the processes that share a learner's work; GroupRanks: several of them, as one group of torch.distributed.

Every process of a learner holds the whole batch and makes the same plan for it. Each runs its own packs. Every layer of
every pass is a collective, so all processes must run as many passes: one that has no pack left runs an idle pack.

A process that holds the whole model is one of GroupRanks: each runs its own packs, and the gradients are added up over
all of them once, after the last pack. That costs more memory than a model that is divided (FsdpRanks in worker.py), and
any number of adapters can stand on it.

Processes send each other records as MessagePack, which is read as the type that the reader expects. torch's own way to
send objects (all_gather_object) pickles them, and reading a pickle runs any program that the sender put into it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.packing import PACK_COST, Pack, Terms, pack_samples
from art_cli.learners.samples import Row, Sample, bare_sample
from art_cli.runtime.errors import LearnerError

Value = TypeVar("Value")


class Ranks:
    """This process among those of its learner: here the only one.

    All processes call `gather`, `forward`, `add_up` and `whole`, in the same order.
    """

    rank, size = 0, 1

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        """Returns every process's value, a record of type `kind`, in the order of their ranks."""
        return [value]

    def forward(self, model: Any, run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
        """Returns `run(pack)`, which calls parts of the model, as one forward pass of the model."""
        return run(pack)

    def add_up(self, tensor: Tensor) -> None:
        """Replaces a tensor that every process holds by the sum over all processes."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the whole tensor of which this process holds a part."""
        return tensor

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the whole tensors in the first process's memory, one gathered after the other; {} in all others."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = self.whole(tensor.detach())
            if self.rank == 0:
                found[name] = whole.cpu().contiguous()
        return found

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, on the device of `like` and divided as `like` is."""
        return tensor.to(like.device)


def pack_evenly(samples: Sequence[Sample], size: int, *, budget: int, share: bool) -> list[Pack]:
    """Returns packs of at most `budget` tokens, or smaller ones where `size` processes finish those sooner."""
    packs = pack_samples(samples, budget=budget, share=share)
    if len(packs) % size == 0:
        return packs
    num_packs = len(packs) + -len(packs) % size
    even = min(budget, -(-sum(len(pack.token_ids) for pack in packs) // num_packs))
    smaller = pack_samples(samples, budget=even, share=share)
    return min(packs, smaller, key=lambda packs: _duration(packs, size))


def deal(packs: Sequence[Pack], rank: int, size: int) -> list[Pack]:
    """Returns the packs that process `rank` of `size` runs. Every process runs as many; idle packs make up the number.

    The processes wait for each other in every pass, so packs of about the same length run in the same pass.
    """
    if size == 1 or not packs:
        return list(packs)
    mine = _longest_first(packs)[rank::size]
    num_passes = -(-len(packs) // size)
    return [*mine, *[_idle(packs[0])] * (num_passes - len(mine))]


def _duration(packs: Sequence[Pack], size: int) -> int:
    """Returns the duration of an update, in tokens. Each pass takes as long as its longest pack."""
    return sum(len(pack.token_ids) + PACK_COST for pack in _longest_first(packs)[::size])


def _longest_first(packs: Sequence[Pack]) -> list[Pack]:
    return sorted(packs, key=lambda pack: -len(pack.token_ids))


def _idle(pack: Pack) -> Pack:
    """Returns a pack of two tokens with nothing to train, so that its loss and gradient are zero."""
    [short] = pack_samples([bare_sample(pack.token_ids[:2], np.array([1]), "idle")], budget=2)
    floats, ints, weights = np.empty(0), np.empty(0, dtype=np.int64), np.empty((len(Row), 0))
    nothing = Terms(edges=ints, samples=ints, weights=weights, logprobs=floats, raw_logprobs=floats)
    return replace(short, terms=nothing, samples=[])


# The dtypes that an array may have whose annotation names the type. An array is its dtype's code, shape and bytes.
NUMBERS: dict[type, dict[bytes, np.dtype[Any]]] = {
    np.float64: {b"d": np.dtype(np.float64), b"f": np.dtype(np.float32)},
    np.int64: {b"q": np.dtype(np.int64)},
}


def encode(value: object) -> bytes:
    """Returns the record's bytes. Its arrays have numbers of NUMBERS."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(data: bytes, kind: type[Value]) -> Value:
    """Returns the record of that type. Raises ValueError if the bytes are no such record."""
    value: Value = msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
    return value


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        code = next((code for codes in NUMBERS.values() for code in codes if codes[code] == value.dtype), None)
        if code is not None:
            return [code, value.shape, value.tobytes()]
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"no form for a {type(value).__name__}")


def _from_plain(kind: Any, given: object) -> object:
    """Returns the value. `kind` is Path, or an array's type with that of its numbers, as NDArray[np.int64]."""
    if kind is Path and isinstance(given, str):
        return Path(given)
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"no form for {kind}")
    code, shape, numbers = msgspec.convert(given, tuple[bytes, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], bytes])
    [wanted] = get_args(get_args(kind)[1])
    if (dtype := NUMBERS[wanted].get(code)) is None:
        raise ValueError(f"an array of {wanted.__name__} with the code {code!r:.20}")
    return np.frombuffer(numbers, dtype).reshape(shape).copy()


MAX_BYTES = 2**31  # largest record


class GroupRanks(Ranks):
    """One process of a process group, which exists already."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Value, kind: type[Value]) -> list[Value]:
        return gather(value, kind, self.size)

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


def gather(value: Value, kind: type[Value], size: int) -> list[Value]:
    """Returns the record of each of the `size` processes, which all call this, in the order of their ranks.

    Raises LearnerError if what another process sent is no such record.
    """
    written = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [int(each) for each in _gather(torch.tensor([len(written)]), size)]
    if not all(0 < each <= MAX_BYTES for each in sizes):
        raise LearnerError(f"the learner's processes sent records of impossible sizes: {sizes}")
    padded = torch.nn.functional.pad(written, (0, max(sizes) - len(written)))
    parts = zip(_gather(padded, size), sizes, strict=True)
    try:
        return [decode(part[:length].numpy().tobytes(), kind) for part, length in parts]
    except ValueError as error:
        raise LearnerError(f"a process of the learner sent what is no such record: {error}") from error


def _gather(tensor: Tensor, size: int) -> list[Tensor]:
    """Returns every process's tensor on the CPU. All have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(tensors, tensor)
    return tensors


def join(device: torch.device, deadline_s: float) -> None:
    """Makes this process one of the group that torchrun started. `deadline_s` is the longest wait in a collective."""
    if not dist.is_initialized():
        backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=timedelta(seconds=deadline_s))


def device_of(name: str) -> torch.device:
    """Returns the CPU, which all processes share, or this process's GPU. Raises LearnerError if there are too few."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    size, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    first = int(name.partition(":")[2] or 0)
    if gpus < first + size:
        start = f" from {name} on" if first else ""
        raise LearnerError(
            f"learner.processes is {size}, and there are {gpus - first} GPUs{start}: each process needs one of its own"
        )
    device = torch.device("cuda", first + int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
