"""Decoder layers computed as two functions give the model's own numbers, forward and backward, and are in use."""

import re
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from art_cli.config.schema import TorchLearnerConfig
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing_check import PackingCheck, compare_batch
from art_cli.models.weights import Weights
from tests.learners.test_pack_runner import SHAPE, samples, weights_of

MODELS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2, biases": transformers.Qwen2Config(**SHAPE),
    "qwen3, norms of the heads": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral, window": transformers.MistralConfig(**SHAPE, sliding_window=8),
}


def adapted(config: Any, targets: str | list[str], **knobs: Any) -> Weights:
    """With adapters, norms and biases that all count."""
    weights = weights_of(config)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **knobs)
    model: Any = get_peft_model(weights.model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return Weights(
        model.eval(), weights.tokenizer, weights.device, weights.dtype, weights.max_length, "tiny", has_adapter=True
    )


def num_in_use(runner: PackRunner) -> int:
    with runner.running():
        return sum("forward" in vars(layer) for layer in runner.model.base_model.layers)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=["all", "two"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logprobs_and_gradient_are_those_of_the_models_own_layers(config: Any, targets: Any) -> None:
    runner = PackRunner(adapted(config, targets), TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack and num_in_use(runner) == 2
    gap = compare_batch(runner, samples())
    assert gap.found.logprob < 1e-5 and gap.found.gradient < 1e-5, str(gap)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [".*", ".*norm.weight|.*bias", ".*(k_proj|up_proj).*", ".*0.*(q_norm|q_proj).*"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_gradients_of_trained_weights_are_those_of_the_models_own_layers(config: Any, trained: str) -> None:
    """All weights, norms and biases only, some projections, and parts of one layer."""
    weights = weights_of(config)
    for name, parameter in weights.model.named_parameters():
        parameter.requires_grad_(re.fullmatch(trained, name) is not None or name.endswith("v_proj.weight"))
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    runner = PackRunner(weights, TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack and num_in_use(runner) == 2
    gap = compare_batch(runner, samples())
    assert gap.found.logprob < 1e-5 and gap.found.gradient < 1e-5, str(gap)


def test_layers_that_are_not_known_stay_as_they_are() -> None:
    """Dropout on an adapter, another activation."""
    assert num_in_use(_settled(adapted(MODELS["llama"], "all-linear", lora_dropout=0.5))) == 0
    assert num_in_use(_settled(adapted(transformers.LlamaConfig(**SHAPE, hidden_act="relu"), "all-linear"))) == 0


def _settled(weights: Weights) -> PackRunner:
    runner = PackRunner(weights, TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack
    return runner
