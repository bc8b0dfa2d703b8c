"""Loading checkpoints into a model: mismatched checkpoints change nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from art_cli.config.schema import LoraConfig
from art_cli.models.adapters import with_adapter
from art_cli.models.device import grow_segments
from art_cli.models.saved_weights import load_checkpoint, save_weights
from art_cli.models.tokenizer import eos_ids, stop_ids
from art_cli.models.weights import Weights
from art_cli.runtime.errors import CheckpointError, UsageError
from tests.support.models.tiny import tiny_weights


def numbers(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in weights.model.named_parameters()}


@pytest.mark.parametrize("targets", ["all-linear", None])
def test_a_checkpoint_of_another_shape_changes_no_weight(tmp_path: Path, targets: str | None) -> None:
    """An attention-only adapter for an all-layer adapter; a wider model's weights for whole weights."""
    bare = tiny_weights(lora_rank=None)
    if targets is None:
        weights, other = bare, tiny_weights(lora_rank=None, vocab=300)
    else:
        weights = with_adapter(bare, LoraConfig(rank=4), 0)
        other = with_adapter(tiny_weights(lora_rank=None), LoraConfig(rank=4, targets=["q_proj"]), 1)
    save_weights(other, tmp_path)
    before, version = numbers(weights), weights.version
    with pytest.raises(CheckpointError):
        load_checkpoint(weights, tmp_path)
    after = numbers(weights)
    assert all(torch.equal(before[name], after[name]) for name in before) and weights.version == version


def test_whole_weights_are_one_file_whatever_their_size(tmp_path: Path) -> None:
    weights = tiny_weights(lora_rank=None)
    save_weights(weights, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    changed = tiny_weights(seed=1, lora_rank=None)
    load_checkpoint(changed, tmp_path)
    expected = numbers(weights)
    assert all(torch.equal(value, expected[name]) for name, value in numbers(changed).items())


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_blocks_grow_in_this_process_only_and_a_users_own_setting_wins(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment, which vLLM's processes inherit, stays as it is."""
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    before = dict(os.environ)
    grow_segments(torch.device("cpu"))
    assert asked == (["expandable_segments:True"] if name is None else [])
    assert dict(os.environ) == before


def test_a_gpu_whose_blocks_cannot_grow_keeps_blocks_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual GPU refuses the first allocation with growing blocks, and every later one."""

    def empty(*shape: int, device: torch.device) -> torch.Tensor:
        if asked[-1] == "expandable_segments:True":
            raise RuntimeError("CUDA driver error: operation not supported")
        return torch.zeros(shape)

    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setattr(torch, "empty", empty)
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    grow_segments(torch.device("cuda"))
    assert asked == ["expandable_segments:True", "expandable_segments:False"]


def test_a_chat_template_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_weights().tokenizer
    tokenizer.chat_template = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("art_cli.models.tokenizer.TEMPLATE_S", 0.05)
    with pytest.raises(UsageError, match="did not end within 0.05 s"):
        stop_ids(tokenizer)


@pytest.mark.parametrize("id", ["x", [1, [2]], 1.5])
def test_an_end_of_text_that_is_no_token_id_is_refused_in_words(id: object) -> None:
    with pytest.raises(UsageError, match="eos_token_id is .*, not a token id"):
        eos_ids(SimpleNamespace(eos_token_id=7), SimpleNamespace(eos_token_id=id))
