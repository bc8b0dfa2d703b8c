"""One process of a learner that has several, started by torchrun (`worker SOCKET LOGS`); FsdpRanks: its divided model.

It answers the calls that workers.py makes to every process: `open` makes its TorchLearner, sharded over all of them;
the rest are the Learner's methods. It ends, whatever it is doing, when the process that calls it has ended.

FSDP2 divides each layer's weights over the processes. They are gathered for the layer's forward and backward pass, and
its gradients are summed over the processes into the part that each one keeps. They are summed, not averaged, because a
loss divides by the counts of the whole update already. Over several nodes each one may hold the whole model, divided
over its own processes; then only gradients go between nodes.
"""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.packing import Pack
from art_cli.learners.processes.group_ranks import GroupRanks, device_of, join
from art_cli.learners.processes.remote_calls import LEARNER, LOST
from art_cli.runtime import log, scratch
from art_cli.runtime.processes.process_server import run_and_exit, serve

if TYPE_CHECKING:
    from art_cli.learners import Progress
    from art_cli.learners.processes.job import Job
    from art_cli.learners.torch_learner import TorchLearner

Json = dict[str, Any]

ADAPTERS = "art_cli.tinker.server.adapter_pool:AdapterLearners"  # what holds the adapters behind `art backend`
COLLECTIVE_DEADLINE_S = 300.0  # longest wait in a collective; ranks drift apart most while each reads the model
HEARTBEAT_S = 1.0
CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words for it


class FsdpRanks(GroupRanks):
    """One process of a group whose model is divided."""

    def forward(self, model: Any, run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
        scores: TokenScores = model.run_pack(run, pack)
        return scores

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
            return tensor.to(like.device)
        # no source rank, because every process has read the whole tensor and nothing need be sent
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Divides a causal LM over the processes of the mesh, on their devices: each of its layers, then the rest.

    Layers are the modules that transformers marks as not to be split. Parameters become DTensors, so the caller must
    collect them afterwards.
    """
    names = set(model._no_split_modules or [])
    for layer in [module for module in model.modules() if type(module).__name__ in names]:
        fully_shard(layer, mesh=mesh)
    model.run_pack = _run_pack
    # sharded again after every forward, because weights that stay gathered would not see the next update
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "run_pack")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo has


def _run_pack(run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
    scores = run(pack)
    # FSDP sets hooks on what carries a gradient, and a view might lose them
    values = None if scores.values is None else scores.values.clone()
    return scores._replace(logprobs=scores.logprobs.clone(), values=values)


def make_mesh(device: torch.device, *, nodes: int = 1) -> DeviceMesh:
    """Returns all processes in a row; or a row for each of so many nodes, of which each holds the whole model."""
    if nodes == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    return init_device_mesh(device.type, (nodes, dist.get_world_size() // nodes), mesh_dim_names=("node", "process"))


def main() -> None:
    address, logs = sys.argv[1:]
    rank = int(os.environ["RANK"])
    _write_to(Path(logs) / f"learner_{rank}.log")
    log.set_up(verbose=True)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    run_and_exit(serve(connection, ServedLearner(rank), heartbeat_s=HEARTBEAT_S), status_of=_status_of)


def _status_of(error: BaseException) -> int:
    """Returns LOST if the cause is another process, which ended before this one and closed its connections."""
    is_network = type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError")
    return LOST if is_network or any(words in str(error) for words in CLOSED) else 1


def _write_to(path: Path) -> None:
    """Sends all output of this process to a file from here on, whether Python writes it or C code."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, scratch.FILE)
    for number in (1, 2):
        os.dup2(file, number)


class Adapters(Protocol):
    """The adapters of several clients, all on one base, by the ids that their caller gives them."""

    def add(self, id: str, lora: Json | None, seed: int) -> None:
        """Adds a fresh adapter; without `lora` a copy of all weights."""

    def drop(self, id: str) -> None:
        """Removes an adapter."""

    def answer(self, id: str, method: str, given: str, progress: "Progress") -> str:
        """Calls a method of an adapter's learner. Returns its encoded result."""


class ServedLearner:
    """This process's part of the learner. Its methods are those of a Learner (remote_calls.py), and those below."""

    _learner: "TorchLearner"
    _adapters: Adapters

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[[str, "Progress"], str]:
        if name not in LEARNER:
            raise AttributeError(name)
        return partial(LEARNER[name].answer, self._learner)

    def identify(self) -> tuple[int, int]:
        """Returns its rank and its process id."""
        return self._rank, os.getpid()

    def open(self, adapters: Json | None = None, **job: Any) -> None:
        """Makes the learner of a job, or with `adapters` a holder of several clients' adapters."""
        if adapters is not None:
            self._adapters = resolve_name(ADAPTERS)(adapters, COLLECTIVE_DEADLINE_S)
            return
        from art_cli.learners.processes.job import Job

        self._learner = make_learner(Job.model_validate(job))

    def add_adapter(self, id: str, lora: Json | None, seed: int) -> None:
        self._adapters.add(id, lora, seed)

    def drop_adapter(self, id: str) -> None:
        self._adapters.drop(id)

    def on_adapter(self, id: str, method: str, given: str, progress: "Progress") -> str:
        return self._adapters.answer(id, method, given, progress)


def make_learner(job: "Job") -> "TorchLearner":
    """Returns this process's part of the learner. Raises LearnerError if there are fewer GPUs than processes."""
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.models.loading import load_weights

    device = device_of(job.learner.device)
    join(device, COLLECTIVE_DEADLINE_S)
    # loaded on the CPU, so that a GPU holds no more of the model than one layer and its own share
    weights = load_weights(job.model, job.base, device="cpu", seed=job.train.seed)
    mesh = make_mesh(device, nodes=job.learner.nodes if job.learner.shard == "node" else 1)
    shard(weights.model.get_base_model() if weights.has_adapter else weights.model, mesh)
    weights.device = device
    return TorchLearner(weights, job.setup, ranks=FsdpRanks())


if __name__ == "__main__":
    main()
