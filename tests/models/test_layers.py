"""Fused layers match the model's own layers, forward and backward, and leave the model unchanged."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from art_cli.learners.packs.tree_attention import attend
from art_cli.models.decoder.layers import known_layers
from tests.support.models.tiny import tiny_weights

IDS = torch.arange(40)[None] * 5 % 250


def results(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns logits and all trained weights' gradients, for a loss with different weights for all logits."""
    model.zero_grad()
    logits = model(IDS, use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def changed(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


@pytest.fixture
def model() -> Iterator[Any]:
    model = tiny_weights().model
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, mean=1.0, std=0.3)  # a weight of 1 would hide its omission
    yield model


def test_logits_and_gradients_are_the_models_own(model: Any) -> None:
    """Per layer 7 adapted projections, 4 norms and the MLP; one more norm at the end."""
    expected = results(model)
    with known_layers(model, attend):
        found = results(model)
        kinds = changed(model)
    assert [kinds.count(kind) for kind in ("Linear", "Qwen3RMSNorm", "Qwen3MLP")] == [14, 9, 2]
    assert len(expected) == 1 + 28  # an A and a B of each projection
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5 * float(tensor.abs().max()))


def test_bfloat16_differs_by_its_rounding_and_adapters_stay_float32(model: Any) -> None:
    """Gradients as far from float32's as the model's own bfloat16 gradients are, within half as much again."""
    exact = results(model)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    own = results(model)
    with known_layers(model, attend):
        found = results(model)
    for name, tensor in exact.items():
        assert found[name].dtype == (torch.bfloat16 if name == "logits" else torch.float32)
        assert (found[name] - tensor).norm() <= 1.5 * (own[name] - tensor).norm() + 0.01 * tensor.norm()


def test_the_adapter_can_be_off_inside(model: Any) -> None:
    with model.disable_adapter():
        expected = model(IDS).logits
    with known_layers(model, attend):
        with model.disable_adapter():
            off = model(IDS).logits
        on = model(IDS).logits
    torch.testing.assert_close(off, expected, rtol=1e-4, atol=1e-4)
    assert float((on - expected).detach().abs().max()) > 0.1


def test_the_model_gets_its_own_layers_back(model: Any) -> None:
    with pytest.raises(RuntimeError, match="inside"), known_layers(model, attend):
        assert changed(model)
        raise RuntimeError("inside")
    assert not changed(model)


def test_what_it_does_not_know_stays_as_it_is() -> None:
    """Trained norms and base layers, dropout on the adapter, other norms and activations."""
    assert all("RMSNorm" not in kind for kind in _changed_inside(tiny_weights(lora_rank=None).model))
    shape: dict[str, Any] = {
        "vocab_size": 265, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    gemma = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**shape, head_dim=8))
    gemma.requires_grad_(False)
    assert _changed_inside(gemma) == []
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, hidden_act="relu"))
    dropped = get_peft_model(llama, LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear"))
    assert set(_changed_inside(dropped)) == {"LlamaRMSNorm"}


def _changed_inside(model: nn.Module) -> list[str]:
    with known_layers(model, attend):
        return changed(model)
