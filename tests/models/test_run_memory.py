"""GPU memory estimates: activations against autograd's storage, shares against vLLM's own check."""

import ast
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from art_cli.config.schema import TorchLearnerConfig
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import pack_samples
from art_cli.models.run_memory import (
    CONTEXT,
    GIB,
    MAX_SHARE,
    RESERVE,
    cache_tokens,
    checkpoint_from,
    expected_share,
    misfit,
    run_memory,
    share,
    size_of,
)
from benchmarks.forecasts.published import published
from tests.learners.test_pack_runner import SHAPE, samples
from tests.models.test_known_layers import adapted
from tests.support.paths import ROOT

BASES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B")
CARDS = (22.0, 23.5, 39.4, 44.3, 79.2, 139.8)  # GiB that torch reports of L4, RTX 4090, A100 40GB, L40S, H100 and H200


def saved_per_token(config: Any) -> float:
    """Returns the bytes per token kept by autograd for a pack, counting every storage once, excluding weights."""
    runner = PackRunner(adapted(config, "all-linear"), TorchLearnerConfig(gradient_checkpointing=False))
    runner.can_pack = True
    [pack] = pack_samples(samples(), budget=1000, share=True)
    sizes: dict[int, int] = {}
    kept = []  # so addresses stay unique

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in runner.model.parameters()}
    with runner.running(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        runner.run(pack)
    return sum(size for place, size in sizes.items() if place not in weights) / len(pack.token_ids)


KINDS = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_the_numbers_that_are_counted(kind: str, head_dim: int) -> None:
    """Two models that differ by six layers, so that embeddings and head cancel out. The adapters have rank 4."""
    if kind == "qwen2":
        head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]  # its only dtype
    knobs = {} if kind == "qwen2" else {"head_dim": head_dim}
    small, large = (KINDS[kind](**SHAPE | {"num_hidden_layers": layers}, **knobs) for layers in (2, 8))
    found = (saved_per_token(large) - saved_per_token(small)) / 6
    size = size_of(small)
    expected = run_memory(size, element=4, is_4bit=False, rank=4, tokens=1).kept / size.layers
    assert found == pytest.approx(expected, rel=0.03), (found, expected)


def test_parameters_and_adapters_are_those_of_the_model() -> None:
    """The published numbers of parameters, and the weights that peft makes."""
    counted = [size_of(published(base)).parameters / 1e9 for base in BASES]
    assert counted == pytest.approx([0.596, 1.72, 4.02, 8.19, 14.77], rel=2e-3)
    config = transformers.Qwen3Config(**SHAPE, head_dim=16)
    weights = adapted(config, "all-linear")
    adapter = sum(each.numel() for name, each in weights.model.named_parameters() if "lora_" in name)
    assert adapter == 4 * size_of(config).lora_per_rank


def requested(free: float, total: float, share: float) -> None:
    """Raises ValueError if vLLM would refuse to start, using its request_memory in v1/worker/utils.py if installed.

    Without vLLM it is the condition that stands there, in 0.32 and 0.33: less is free than the share of the total.
    """
    snapshot = SimpleNamespace(free_memory=int(free), total_memory=int(total), device_="cuda:0")
    if (request := own_request()) is not None:
        request(snapshot, SimpleNamespace(gpu_memory_utilization=share))
    elif free < math.ceil(total * share):
        raise ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization")


def own_request() -> Any:
    """Extracts request_memory from vLLM's source, if vLLM is installed."""
    python = Path(os.environ.get("ART_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    for source in python.parent.parent.glob("lib/python3*/site-packages/vllm/v1/worker/utils.py"):
        functions = [each for each in ast.parse(source.read_text()).body if isinstance(each, ast.FunctionDef)]
        [request] = [each for each in functions if each.name == "request_memory"]
        for argument in request.args.args:
            argument.annotation = None
        request.returns = None
        module = ast.Module([request], type_ignores=[])
        names: dict[str, Any] = {"math": math, "format_gib": lambda number: f"{number / GIB:.2f}", "logger": None}
        exec(compile(module, str(source), "exec"), names)
        return names["request_memory"]
    return None


@pytest.mark.parametrize("total", CARDS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("is_4bit", [False, True])
def test_vllm_starts_with_the_share_that_is_measured_and_where_it_fits_its_cache_has_room(
    base: str, is_4bit: bool, total: float
) -> None:
    """Free memory when vLLM asks: the GPU minus the learner and both processes' contexts."""
    run = run_memory(size_of(published(base)), element=2, is_4bit=is_4bit, rank=16, tokens=8192)
    free = total * GIB - run.learner - 2 * CONTEXT
    found = share(total * GIB, free)
    assert found == expected_share(total * GIB, run) <= MAX_SHARE
    if found > 0:
        requested(free, total * GIB, found)
        assert free - found * total * GIB >= RESERVE - 1 or found == MAX_SHARE
    if not misfit(total * GIB, run, share=found, max_length=8192):
        assert cache_tokens(total * GIB, run, found) >= 8192 and free > 0
    with pytest.raises(ValueError, match="Free memory on device"):
        requested(free, total * GIB, (free + GIB) / (total * GIB))


def test_activations_are_computed_again_from_half_of_what_is_free_on() -> None:
    """8B on an H100: 3.4 MB a token (gate and up alone are 1.8), so a row of 20,000 tokens would take 68 GB."""
    run = run_memory(size_of(published("Qwen/Qwen3-8B")), element=2, is_4bit=False, rank=16, tokens=8192)
    tokens = checkpoint_from(79.2 * GIB, run)
    assert run.kept == pytest.approx(3.47e6, rel=0.02)
    assert 8192 < tokens < 20_000 and 0.5 * (79.2 * GIB - run.learner) > tokens * run.kept
    beside = run_memory(
        size_of(published("Qwen/Qwen3-8B")), element=2, is_4bit=False, rank=16, tokens=8192, is_beside=True
    )
    assert checkpoint_from(79.2 * GIB, beside) == 1
    both = expected_share(79.2 * GIB, beside) * 79.2 * GIB + beside.learner + beside.step
    assert both < 79.2 * GIB - RESERVE, "vLLM and a step are on the GPU at the same time"


def test_a_gpu_that_is_used_up_computes_every_pass_again_and_gives_vllm_nothing() -> None:
    run = run_memory(size_of(published("Qwen/Qwen3-14B")), element=2, is_4bit=False, rank=16, tokens=8192)
    assert checkpoint_from(22.0 * GIB, run) == 1 and expected_share(22.0 * GIB, run) == 0.0
    assert "the learner's weights take 28" in misfit(22.0 * GIB, run, share=0.0, max_length=8192)
    alone = run._replace(learner=0.0, step=0.0)
    assert "does not hold" in misfit(22.0 * GIB, alone, share=0.9, max_length=8192)
    assert "model.max_length is 99,999" in misfit(39.4 * GIB, alone, share=0.9, max_length=99_999)


def test_a_divided_model_takes_its_part_of_each_gpu() -> None:
    size = size_of(published("Qwen/Qwen3-8B"))
    whole = run_memory(size, element=2, is_4bit=False, rank=16, tokens=8192)
    divided = run_memory(size, element=2, is_4bit=False, rank=16, tokens=8192, learners=4, engines=2)
    assert divided.learner == whole.learner / 4 and divided.cached == whole.cached / 2
    assert divided.step == whole.step, "each process has activations of whole layers"
