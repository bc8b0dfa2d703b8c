"""`dtype: auto` is what pays here: bfloat16 where its products are measured to be much faster."""

from typing import Any

import pytest
import torch

from art_cli import precision
from art_cli.config.schema import ModelConfig, RunConfig
from art_cli.learners import make_learner, parallel
from art_cli.model import count_parameters, load_weights
from tests.support.tiny import save_tiny_base, tiny_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is measured."""

    def set_gain(gain: float) -> None:
        monkeypatch.setattr(precision, "gain_of_bfloat16", lambda device: gain)

    return set_gain


def test_products_are_measured_here_and_once() -> None:
    precision.gain_of_bfloat16.cache_clear()
    gain = precision.gain_of_bfloat16("cpu")
    assert 0.001 < gain < 1000
    assert precision.gain_of_bfloat16("cpu") == gain  # a second measurement would differ in its last digits


@pytest.mark.gpu
def test_tensor_cores_are_worth_it(base: str) -> None:
    assert precision.choose_dtype(base, GPU) == torch.bfloat16


def test_bfloat16_only_where_it_pays(base: str, gain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "SMALL", 0)
    gain(2.1)
    assert precision.choose_dtype(base, CPU) == precision.choose_dtype(base, GPU) == torch.float32
    gain(6.0)
    assert precision.choose_dtype(base, CPU) == precision.choose_dtype(base, GPU) == torch.bfloat16


def test_a_small_model_stays_exact_on_a_cpu(base: str, gain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gain(6.0)
    assert precision.choose_dtype(base, CPU) == torch.float32
    assert precision.choose_dtype(base, GPU) == torch.bfloat16
    size = count_parameters(load_weights(ModelConfig(base=base, lora=None), base).model).whole
    monkeypatch.setattr(precision, "SMALL", size)  # counted without loading it
    assert precision.choose_dtype(base, CPU) == torch.bfloat16
    monkeypatch.setattr(precision, "SMALL", size + 1)
    assert precision.choose_dtype(base, CPU) == torch.float32


def test_weights_are_loaded_as_chosen_and_a_name_is_a_name(
    base: str, gain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "SMALL", 0)
    gain(6.0)
    chosen = load_weights(ModelConfig(base=base, dtype="auto"), base)
    assert chosen.dtype == chosen.model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert {p.dtype for p in chosen.model.parameters() if p.requires_grad} == {torch.float32}
    assert load_weights(ModelConfig(base=base, dtype="float32"), base).dtype == torch.float32


def test_processes_of_a_learner_take_what_was_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(parallel, "parallel_learner", lambda **knobs: given.update(knobs))
    settings = {"name": "x", "model": {"base": "x"}, "learner": {"name": "torch", "processes": 2}}
    settings |= {"engine": {"name": "embedded"}, "rollout": {"entry": "a.py:b", "scenarios": "c.jsonl"}}
    weights = tiny_weights()
    weights.dtype = torch.bfloat16
    make_learner(RunConfig.model_validate(settings), weights)
    assert given["model"].dtype == "bfloat16"
