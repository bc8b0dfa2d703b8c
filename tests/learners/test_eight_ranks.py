"""A learner of eight processes, seen by one of them: the other seven are torch's fake process group.

Its collectives give each process its own numbers back, so shapes, devices, meshes and files can be held, and no value
can. test_parallel_learner.py and test_nodes.py have the values, of two processes.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from art_cli.config.schema import GrpoConfig, LoraConfig, ModelConfig, TorchLearnerConfig, TrainConfig
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.worker import make_learner
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop import trial_update
from tests.support.models.tiny import save_tiny_base

SIZE = 8


@contextlib.contextmanager
def rank_of_eight(rank: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    local = SIZE // nodes
    numbers = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": local}
    for name, number in numbers.items():
        monkeypatch.setenv(name, str(number))
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *ranks, backend=None, **knobs: new_group(*ranks, **knobs))  # all fake
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def learner_of(base: str, nodes: int, *, lora: bool) -> TorchLearner:
    shard = "node" if nodes > 1 else "all"
    knobs = {"processes": SIZE // nodes, "nodes": nodes, "shard": shard, "micro_batch_tokens": 64, "device": "cpu"}
    return make_learner(
        Job(
            base=base,
            model=ModelConfig(base=base, dtype="float32", lora=LoraConfig(rank=4, alpha=8) if lora else None),
            train=TrainConfig(learning_rate=1e-3, epochs_per_step=1, max_logprob_gap=1e9),
            loss=GrpoConfig(),
            learner=TorchLearnerConfig.model_validate(knobs),
            sft=None,
            sampling_max_tokens=16,
        )
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (1, 7), (2, 0), (2, 5), (4, 3)])
def test_each_of_eight_processes_holds_its_part_of_every_tensor(
    nodes: int, rank: int, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided over the processes of a node where each node holds the model, over all otherwise."""
    size = SIZE // nodes
    with rank_of_eight(rank, nodes, monkeypatch):
        learner = learner_of(base, nodes, lora=True)
        for name, parameter in learner.weights.model.named_parameters():
            assert isinstance(parameter, DTensor), name
            mesh, placements = parameter.device_mesh, parameter.placements
            assert mesh.shape == ((SIZE,) if nodes == 1 else (nodes, size))
            assert placements == ((Shard(0),) if nodes == 1 else (Replicate(), Shard(0))), name
            rows, chunk = len(parameter), math.ceil(len(parameter) / size)
            first = min(rank % size * chunk, rows)
            assert len(parameter.to_local()) == min(chunk, rows - first), name


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_step_of_eight_processes_writes_whole_tensors(
    nodes: int, lora: bool, base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with rank_of_eight(0, nodes, monkeypatch):
        learner = learner_of(base, nodes, lora=lora)
        metrics = trial_update.step(learner, 12, vocabulary=learner.weights.vocabulary)
        assert metrics.num_updates > 0
        moments = learner.optimizer.tensors()
        learner.save(tmp_path)
        shapes = {name: tuple(parameter.shape) for name, parameter in learner.parameters.items()}
        own = [each for name, each in moments.items() if not name.endswith("step")]
        assert own and all(isinstance(each, DTensor) for each in own)
        learner.load(tmp_path)
        assert all(isinstance(each, DTensor) for each in learner.parameters.values())
    with safe_open(tmp_path / "optimizer.safetensors", "pt") as file:
        assert {n: tuple(file.get_slice(f"{n}:exp_avg").get_shape()) for n in shapes} == shapes
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    with safe_open(tmp_path / name, "pt") as file:
        total = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    assert total == sum(map(math.prod, shapes.values()))
    assert not dist.is_initialized() and torch.get_default_device().type == "cpu"
