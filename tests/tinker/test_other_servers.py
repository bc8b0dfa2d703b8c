"""What other servers of the Tinker protocol do otherwise than `art backend`, in the forms that they send."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from art_cli.runtime.errors import CheckpointError
from art_cli.tinker.client.remote_checkpoint import RemoteCheckpoint, name_targets

STATE = "tinker://model_1/weights/at-1"


def test_weights_to_sample_from_may_have_a_path_without_a_kind() -> None:
    made = RemoteCheckpoint(url="http://gpu:1", base_model="m", state=STATE, sampler="tinker://model_1/at-1")
    assert msgspec.json.decode(msgspec.json.encode(made), type=RemoteCheckpoint) == made
    for wrong in ("tinker://model_1", "tinker://a/b/c/d", "tinker://a/../../c", "/tmp/weights", "tinker://a/b?c"):
        with pytest.raises(ValueError, match="not a path"):
            RemoteCheckpoint(url="http://gpu:1", base_model="m", state=STATE, sampler=wrong)


def test_an_adapter_that_does_not_name_its_layers_gets_them_from_its_tensors(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    names = [f"base_model.model.model.layers.0.self_attn.{layer}.lora_A.weight" for layer in ("v_proj", "q_proj")]
    save_file({name: np.zeros((1, 2), np.float32) for name in names}, tmp_path / "adapter_model.safetensors")
    config.write_text(json.dumps({"r": 1, "target_modules": None}))
    name_targets(tmp_path)
    assert json.loads(config.read_text()) == {"r": 1, "target_modules": ["q_proj", "v_proj"]}
    config.write_text("[1]")
    with pytest.raises(CheckpointError, match="not an adapter"):
        name_targets(tmp_path)
