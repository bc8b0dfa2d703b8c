"""FsdpRanks: a learner's model in several processes, sharded by FSDP2.

Each layer's weights are divided over the processes. They are gathered for the layer's forward and backward pass, and
its gradients are summed over the processes into the part that each one keeps. They are summed, not averaged, because a
loss divides by the counts of the whole update already. Over several nodes each one may hold the whole model, divided
over its own processes; then only gradients go between nodes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.packing import Pack
from art_cli.learners.processes.process_group import GroupRanks


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
