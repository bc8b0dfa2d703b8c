"""4-bit bases compute the logprobs of their dequantized weights, and training on them keeps the contracts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from art_cli.cli.export import _as_text
from art_cli.config.checks import conflicts
from art_cli.config.schema import EmbeddedEngineConfig, GrpoConfig, ModelConfig, RunConfig, VllmEngineConfig
from art_cli.engines.proof import make_probe, mean_gap
from art_cli.engines.vllm.arguments import command
from art_cli.models import precision
from art_cli.models.adapters import on_base
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.saved_weights import ADAPTER_FILE, save_weights
from art_cli.models.weights import Weights, count_parameters, token_logprobs
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from art_cli.serving.merged_export import export
from art_cli.serving.served_model import find_source
from art_cli.serving.served_policies import Loader
from tests.support.models.gradients import Caught, distance, learner, reference_gradient, two_answers
from tests.support.models.tiny import save_tiny_base
from tests.support.records.trees import sampled, scored, turn

pytestmark = pytest.mark.quantize
IDS = list(range(2, 42))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def load(base: str) -> Callable[..., Weights]:
    def load(**settings: Any) -> Weights:
        config = {"base": base, "lora": {"rank": 4}, "quantize": "4bit", "dtype": "float32", **settings}
        weights = load_weights(ModelConfig.model_validate(config), base)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for name, parameter in weights.model.named_parameters():
                if "lora_B" in name:  # zero as loaded: the adapter would not show
                    torch.nn.init.normal_(parameter, std=0.05)
        return weights

    return load


def dequantized(weights: Weights) -> Weights:
    """The same policy with its base's 4-bit weights written out in float32, in ordinary linear layers."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    plain = load_weights(
        ModelConfig.model_validate({"base": weights.base, "lora": {"rank": 4}, "dtype": "float32"}), weights.base
    )
    targets = dict(plain.model.named_modules())
    num_written = 0
    with torch.no_grad():
        for name, module in weights.model.named_modules():
            if isinstance(module, Linear4bit):
                whole = dequantize_4bit(module.weight.data, module.weight.quant_state)
                targets[name].weight.copy_(whole.view(targets[name].weight.shape))
                num_written += 1
        ours = dict(plain.model.named_parameters())
        for name, parameter in weights.model.named_parameters():
            if "lora_" in name:
                ours[name].copy_(parameter)
    assert num_written == 2 * 7
    return plain


def trained_groups(weights: Weights) -> list[Any]:
    other = [
        scored(sampled(weights, [turn([1, 2, 9, 9], answer)]), reward, index=index, group="b")
        for index, (answer, reward) in enumerate([([40], 0.0), ([50, 51, 52, 53], 0.3), ([50, 61], 0.4)])
    ]
    return [two_answers(weights, group="a"), other]


def test_the_base_is_in_4_bits_its_adapter_in_float32(load: Callable[..., Weights]) -> None:
    for dtype in ("float32", "bfloat16"):
        weights = load(dtype=dtype)
        layers = [layer for name, layer in weights.model.named_modules() if name.endswith("proj.base_layer")]
        kinds = {(type(layer).__name__, layer.weight.dtype, layer.weight.quant_type) for layer in layers}
        assert kinds == {("Linear4bit", torch.uint8, "nf4")}
        assert all(layer.weight.quant_state.nested for layer in layers)
        trained = {parameter.dtype for parameter in weights.model.parameters() if parameter.requires_grad}
        assert trained == {torch.float32}
        assert precision.is_quantized(weights.model.get_base_model())


def test_it_computes_what_its_dequantised_weights_do(load: Callable[..., Weights]) -> None:
    weights = load()
    found, expected = token_logprobs(weights, IDS), token_logprobs(dequantized(weights), IDS)
    assert found == pytest.approx(expected, abs=1e-4)
    whole = token_logprobs(load(quantize=None), IDS)
    assert found != pytest.approx(whole, abs=1e-2)


@pytest.mark.parametrize("packing", ["tree", "rows"])
def test_gradient_of_a_step_is_that_of_the_dequantised_policy(packing: str, load: Callable[..., Weights]) -> None:
    """Contract 1, after the weights have been used without gradients, as an engine or a score does before each step."""
    weights = load()
    plain = dequantized(weights)
    groups = trained_groups(plain)
    expected = reference_gradient(plain, groups, GrpoConfig())
    caught = Caught(learner(weights, packing=packing, micro_batch_tokens=16, max_grad_norm=1e9))
    caught.learner.score(IDS)
    metrics = caught.learner.step(groups)
    assert caught.learner.runner.can_pack
    assert metrics.logprob_gap < 1e-4  # contract 2: the engine's logprobs here are the dequantised policy's
    assert distance(caught.gradient, expected) < 1e-5


def test_bfloat16_keeps_the_gradient_within_its_rounding(load: Callable[..., Weights]) -> None:
    weights = load(dtype="bfloat16")
    plain = dequantized(weights)
    groups = trained_groups(plain)
    expected = reference_gradient(plain, groups, GrpoConfig())
    caught = Caught(learner(weights, max_grad_norm=1e9))
    assert caught.learner.step(groups).logprob_gap < 5e-2
    assert distance(caught.gradient, expected) < 0.1


def test_a_step_moves_the_policy_and_the_next_load_goes_on_from_there(
    load: Callable[..., Weights], tmp_path: Path
) -> None:
    """Saved and loaded into a fresh 4-bit base, the next step is bit-identical; the base never moves."""
    first, second = learner(load()), learner(load())
    groups = trained_groups(first.weights)
    frozen = [p.detach().clone() for p in first.weights.model.parameters() if not p.requires_grad]
    before = first.score(IDS)
    first.step(groups)
    assert first.score(IDS) != before
    first.save(tmp_path)
    first.step(groups)
    second.load(tmp_path)
    second.step(groups)
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name
    after = [p for p in first.weights.model.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, after, strict=True))
    assert all("lora_" in name for name in load_file(tmp_path / ADAPTER_FILE))


async def test_the_embedded_engine_samples_from_the_same_4_bits(load: Callable[..., Weights]) -> None:
    """Contract 5: engine and learner agree on the probe, before and after a step, within float32's bound."""
    from art_cli.engines.embedded.embedded_engine import EmbeddedEngine

    trained = learner(load())
    engine = EmbeddedEngine(trained.weights, name="policy", config=EmbeddedEngineConfig())
    await engine.start()
    try:
        probe = make_probe(265)
        for _ in range(2):
            assert mean_gap(await engine.score(probe), trained.score(probe)) < 1e-4
            trained.step(trained_groups(trained.weights))
    finally:
        await engine.close()


def test_adapters_on_one_4_bit_base_share_it(load: Callable[..., Weights], tmp_path: Path) -> None:
    weights = load()
    save_weights(weights, tmp_path)
    bare = load(lora=None)
    policy = on_base(bare, tmp_path)
    expected = token_logprobs(weights, IDS)
    assert token_logprobs(policy, IDS) == pytest.approx(expected, abs=1e-5)
    shared = {p.data_ptr() for p in bare.model.parameters()}
    assert {p.data_ptr() for n, p in policy.model.named_parameters() if "lora_" not in n} == shared


def test_parameters_are_counted_as_those_of_the_same_model_in_float32(load: Callable[..., Weights]) -> None:
    """Two of them share a byte in 4 bits."""
    assert count_parameters(load().model) == count_parameters(load(quantize=None).model)
    assert sum(p.numel() for p in load().model.parameters()) < count_parameters(load().model).whole


def test_without_bitsandbytes_one_line_says_what_to_install(
    load: Callable[..., Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"model.quantize: needs bitsandbytes, .* pip install 'art-cli\[quantize\]'"):
        load()


def test_a_4_bit_base_without_an_adapter_cannot_be_trained() -> None:
    settings: dict[str, Any] = {
        "name": "x",
        "model": {"base": "b", "quantize": "4bit", "lora": None},
        "rollout": {"entry": "r.py:r", "scenarios": "s.jsonl"},
    }
    [(key, message)] = conflicts(RunConfig.model_validate(settings))
    assert key == "model.quantize"
    assert "set model.lora" in message


# --- what is served and exported --------------------------------------------------------------------------------------


@pytest.fixture
def trained_run(load: Callable[..., Weights], base: str, tmp_path: Path) -> Path:
    """A run directory with one checkpoint, trained on the base in 4 bits."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    config = {"model": {"base": base, "dtype": "float32", "quantize": "4bit", "max_length": None}}
    run.config_path.write_text(json.dumps(config))
    with new_checkpoint(run.checkpoint_path(1), Manifest(step=1, base=base, config_hash="x", metrics={})) as directory:
        save_weights(load(), directory)
    return run.root


def test_a_checkpoint_is_served_on_the_base_it_was_trained_on(trained_run: Path, load: Callable[..., Weights]) -> None:
    loader = Loader(EmbeddedEngineConfig(), logs=trained_run)
    weights = loader._weights(find_source(str(trained_run)))
    assert weights.quantize == "4bit"
    assert token_logprobs(weights, IDS) == pytest.approx(token_logprobs(load(), IDS), abs=1e-5)


def test_an_export_is_merged_into_the_whole_base_and_says_so(
    trained_run: Path, load: Callable[..., Weights], tmp_path: Path
) -> None:
    source = find_source(str(trained_run))
    exported = export(source, tmp_path / "out", dtype="float32", bound=None)
    assert exported.max_gap < 1e-4
    assert "trained on the base in 4bit, merged into the whole one" in _as_text(
        exported, "float32", "4bit", is_gguf=False
    )
    assert "| base in training | 4bit |" in (tmp_path / "out" / "README.md").read_text()
    whole = load_weights(ModelConfig(base="x", lora=None, dtype="float32"), str(tmp_path / "out"))
    assert not precision.is_quantized(whole.model)
    expected = token_logprobs(load(quantize=None), IDS)
    assert token_logprobs(whole, IDS) == pytest.approx(expected, abs=1e-4)


def test_vllm_is_told_to_quantise_as_the_learner_does(load: Callable[..., Weights]) -> None:
    for quantize, expected in (("4bit", ["bitsandbytes"]), (None, [])):
        served = spec_of(load(quantize=quantize, dtype="bfloat16"))
        argv = command(
            VllmEngineConfig(name="vllm"),
            served,
            python=Path("p"),
            port=1,
            name="n",
            template=None,
            sleep=0,
            has_gpu=True,
        )
        assert [argv[i + 1] for i, word in enumerate(argv) if word == "--quantization"] == expected
