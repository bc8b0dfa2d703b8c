"""One worker process of a learner, started by torchrun (`worker SOCKET LOGS`); FsdpRanks for a sharded model.

It answers the calls that workers.py sends to every process: `open` builds the TorchLearner, sharded across all
processes; the other calls are Learner methods. It exits as soon as the calling process ends.

FSDP2 shards each layer's weights across processes. Weights are gathered for the layer's forward and backward pass, and
gradients are sum-reduced into the shards. They are summed rather than averaged, because the loss already divides by the
whole update's counts. With several nodes, each node may hold the whole model, sharded across its processes; then only
gradients travel between nodes.
"""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

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

ADAPTERS = "art_cli.tinker.server.adapter_pool:AdapterLearners"  # holds the adapters for `art backend`
COLLECTIVE_DEADLINE_S = 300.0  # longest wait in a collective; ranks drift apart most while loading the model
HEARTBEAT_S = 1.0
CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's error messages


class FsdpRanks(GroupRanks):
    """One process in a group with a sharded model."""

    def forward(self, model: Any, run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
        scores: TokenScores = model.run_pack(run, pack)
        return scores

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
            return tensor.to(like.device)
        # no source rank, because every process has loaded the whole tensor
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shards a causal LM across the mesh's processes and devices: every layer, then the remaining modules.

    Layers are the modules listed in transformers' _no_split_modules. Parameters become DTensors, so the caller must
    collect them afterwards.
    """
    names = set(model._no_split_modules or [])
    for layer in [module for module in model.modules() if type(module).__name__ in names]:
        fully_shard(layer, mesh=mesh)
    model.run_pack = _run_pack
    # resharded after every forward pass, because gathered weights would miss the next update
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "run_pack")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only reduction supported by gloo


def _run_pack(run: Callable[[Pack], TokenScores], pack: Pack) -> TokenScores:
    scores = run(pack)
    # FSDP attaches hooks to outputs that carry a gradient, and a view might lose them
    values = None if scores.values is None else scores.values.clone()
    return scores._replace(logprobs=scores.logprobs.clone(), values=values)


def make_mesh(device: torch.device, *, nodes: int = 1) -> DeviceMesh:
    """Returns a one-dimensional mesh, or a mesh [nodes, processes] in which each node holds the whole model."""
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
    """Returns LOST if the error came from another process ending earlier and closing its connections."""
    is_network = type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError")
    return LOST if is_network or any(words in str(error) for words in CLOSED) else 1


def _write_to(path: Path) -> None:
    """Redirects all output of this process to a file, for both Python and C code."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, scratch.FILE)
    for number in (1, 2):
        os.dup2(file, number)


class ServedLearner:
    """This process's part of the learner. It answers the Learner methods in remote_calls.py and the methods below."""

    _learner: "TorchLearner"
    _adapters: Any  # AdapterLearners (tinker/server/adapter_pool.py), keyed by ids that the caller chooses

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[[str, "Progress"], str]:
        if name not in LEARNER:
            raise AttributeError(name)
        return partial(LEARNER[name].answer, self._learner)

    def identify(self) -> tuple[int, int]:
        """Returns rank and process id."""
        return self._rank, os.getpid()

    def open(self, adapters: Json | None = None, **job: Any) -> None:
        """Builds the learner for a job, or with `adapters` a container for several clients' adapters."""
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
        result: str = self._adapters.answer(id, method, given, progress)
        return result


def make_learner(job: "Job") -> "TorchLearner":
    """Returns this process's part of the learner. Raises LearnerError if there are fewer GPUs than processes."""
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.models.device import grow_segments
    from art_cli.models.loading import load_weights

    device = device_of(job.learner.device)
    join(device, COLLECTIVE_DEADLINE_S)
    if device.type == "cuda":
        grow_segments(device)
    # loaded on the CPU, so the GPU never holds more than one layer plus its shard
    weights = load_weights(job.model, job.base, device="cpu", seed=job.train.seed)
    mesh = make_mesh(device, nodes=job.learner.nodes if job.learner.shard == "node" else 1)
    shard(weights.inner_model, mesh)
    weights.device = device
    return TorchLearner(weights, job.setup, ranks=FsdpRanks())


if __name__ == "__main__":
    main()
