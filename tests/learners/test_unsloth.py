"""The Unsloth learner: the torch learner's step on weights that Unsloth loaded, or one line that says why not."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from art_cli.config.checks import conflicts
from art_cli.config.schema import GrpoConfig, ModelConfig, RunConfig
from art_cli.engines.embedded.model_runner import ForwardRunner
from art_cli.learners import load_policy, make_learner, unsloth
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.loading import load_weights
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runtime.errors import EngineError, LearnerError
from tests.support.models.gradients import Caught, distance, reference_gradient, two_answers
from tests.support.models.tiny import save_tiny_base
from tests.support.others.unsloth_backend import compare
from tests.support.paths import ROOT
from tests.support.standins import fake_unsloth
from tests.support.standins.fake_unsloth import install

PYTHON = Path(os.environ.get("ART_UNSLOTH_PYTHON", ROOT / ".venv-unsloth/bin/python"))
IMPORT = "from tests.support.standins.fake_unsloth import"
IGNORES_MASKS = f"{IMPORT} IgnoresMasks as FastLanguageModel\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def config(base: str) -> Callable[..., RunConfig]:
    def config(**of_model: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "x",
                "model": {"base": base, "dtype": "float32", "lora": {"rank": 4, "alpha": 8}, **of_model},
                "rollout": {"entry": "r.py:r", "scenarios": "s.jsonl"},
                "learner": {"name": "unsloth"},
                "train": {"learning_rate": 1e-5, "max_grad_norm": 1e9, "seed": 3},
            }
        )

    return config


# --- whether it can run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "needs", "expected"),
    [
        ("2026.10.9", ("torch<2.15.0", "transformers<=5.99"), None),
        ("2026.10.9", ("torch<2.15.0", 'triton; sys_platform == "win32"', 'trl<1; extra == "x"'), None),
        ("2025.1.2", (), "Unsloth 2025.1.2 is too old: pip install 'unsloth>=2026.10'"),
        (
            "2026.10.9",
            ("transformers<=5.1,>=4.52",),
            f"Unsloth 2026.10.9 needs transformers<=5.1,>=4.52, and {transformers.__version__} is installed: "
            "pip install 'transformers<=5.1,>=4.52'",
        ),
        (
            "2026.10.9",
            ("unsloth_zoo>=2026.10.9",),
            "Unsloth 2026.10.9 needs unsloth_zoo>=2026.10.9, and unsloth_zoo is not installed: "
            "pip install 'unsloth_zoo>=2026.10.9'",
        ),
        (
            "2026.10.7",
            (),
            "Unsloth 2026.10.7 needs a GPU, and torch finds no GPU: pip install 'unsloth>=2026.10.9'",
        ),
    ],
)
def test_one_line_says_which_version_and_what_to_install(
    version: str, needs: tuple[str, ...], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without importing it: this one could not be."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install(tmp_path, monkeypatch, version=version, needs=needs, body="raise RuntimeError('imported')")
    assert unsloth.obstacle() == expected
    assert "unsloth" not in sys.modules


def test_where_it_is_missing_the_learner_says_so(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise unsloth.PackageNotFoundError(name)

    monkeypatch.setattr(unsloth, "version", missing)
    with pytest.raises(
        LearnerError, match=r"'unsloth' cannot run here: Unsloth is not installed: pip install 'art-cli\[unsloth\]', or"
    ):
        load_policy(config(), config().model.base)


def test_an_import_that_fails_is_one_line(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, body="raise NotImplementedError('no\\naccelerator')")
    with pytest.raises(
        LearnerError, match=r"2026.10.9 cannot be imported here \(NotImplementedError: no accelerator\)"
    ):
        load_policy(config(), config().model.base)


def test_it_trains_adapters_only(config: Callable[..., RunConfig]) -> None:
    [(key, message)] = conflicts(config(lora=None))
    assert (key, "LoRA adapters only" in message) == ("learner", True)


# --- what it loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [None, pytest.param("4bit", marks=pytest.mark.quantize)])
def test_it_loads_what_the_configuration_says(
    quantize: str | None,
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its words go to stderr, the run's random numbers stay where they are, adapters are float32."""
    install(tmp_path, monkeypatch)
    run = config(dtype="bfloat16", quantize=quantize, max_length=512)
    before = torch.get_rng_state()
    weights = load_policy(run, run.model.base)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().out == ""
    asked = {
        name: fake_unsloth.CALLS[0][name] for name in ("load_in_4bit", "dtype", "max_seq_length", "r", "lora_alpha")
    }
    assert list(asked.values()) == [quantize is not None, torch.bfloat16, 512, 4, 8]
    assert fake_unsloth.CALLS[0]["use_exact_model_name"] is True
    assert (weights.dtype, weights.max_length, weights.has_adapter) == (torch.bfloat16, 512, True)
    assert {p.dtype for p in weights.model.parameters() if p.requires_grad} == {torch.float32}
    assert not weights.model.training


@pytest.mark.quantize
def test_a_base_that_it_did_not_quantise_is_refused(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, body=f"{IMPORT} QuantizesNothing as FastLanguageModel")
    run = config(quantize="4bit")
    with pytest.raises(LearnerError, match="did not load .* in 4bit: set model.quantize=null"):
        load_policy(run, run.model.base)


# --- the step ---------------------------------------------------------------------------------------------------------


def plain_twin(run: RunConfig, weights: Weights) -> Weights:
    """The same policy, loaded by transformers and peft."""
    twin = load_weights(run.model, run.model.base)
    ours = dict(twin.model.named_parameters())
    with torch.no_grad():
        for name, parameter in weights.model.named_parameters():
            if "lora_" in name:
                ours[name].copy_(parameter)
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("ignores_masks", [False, True])
def test_the_gradient_is_that_of_one_sequence_at_a_time(
    ignores_masks: bool,
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Contract 1, also where its attention ignores the tree of a pack: then on plain rows, and the log says so."""
    install(tmp_path, monkeypatch, **({"body": IGNORES_MASKS} if ignores_masks else {}))
    run = config()
    weights = load_policy(run, run.model.base)
    twin = plain_twin(run, weights)
    groups = [two_answers(twin)]
    expected = reference_gradient(twin, groups, GrpoConfig())
    trained = make_learner(run, weights)
    assert isinstance(trained, TorchLearner)
    caught = Caught(trained)
    with caplog.at_level(logging.WARNING):
        metrics = trained.step(groups)
    warnings = [record.message for record in caplog.records if "packed" in record.message]
    assert trained.runner.can_pack is not ignores_masks
    assert len(warnings) == ignores_masks
    assert all("nats" in warning and "over 0.0001" in warning for warning in warnings)
    assert metrics.logprob_gap < 1e-5
    assert distance(caught.gradient, expected) <= 1e-5


# --- an engine in the same process ------------------------------------------------------------------------------------


def test_the_embedded_engine_refuses_attention_it_cannot_steer(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, body=IGNORES_MASKS)
    run = config()
    weights = load_policy(run, run.model.base)
    with pytest.raises(EngineError, match=r"unsloth.models.qwen3 .* engine=vllm, or learner=torch"):
        ForwardRunner(weights)


def test_the_embedded_engine_runs_what_kept_its_attention(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    run = config()
    weights = load_policy(run, run.model.base)
    ids = list(range(2, 30))
    assert ForwardRunner(weights).score(ids) == pytest.approx(token_logprobs(weights, ids), abs=1e-4)


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_of_several_clients_learn_on_a_base_that_it_loaded(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    result = compare(base)
    assert result["logprobs"] == result["weights"] == 0.0 and result["moved"] > 1e-3


def test_a_base_that_holds_on_to_its_own_layers_is_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter stands on a copy of the modules, which such a pass goes around."""
    install(tmp_path, monkeypatch, body=f"{IMPORT} HoldsOn as FastLanguageModel\n")
    config = ModelConfig(base=base, lora=None, dtype="float32")
    loaded = load_weights(config, base, load=unsloth.load_bare)
    with pytest.raises(LearnerError, match="runs this model past the adapters of clients: set learner=torch"):
        unsloth.check_adapters(loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=embedded"], "embedded cannot sample from Unsloth's model: engine=vllm, or learner=torch"),
        (["model.lora=null"], "lora: null trains all weights, and Unsloth adapters only: learner=torch, or set it"),
    ],
)
def test_a_backend_says_what_goes_with_it(
    overrides: list[str], message: str, base: str, art: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, errors = art("backend", "--base", base, "--port", "0", "learner=unsloth", *overrides)
    assert code == 2 and message in errors


def run_child(python: Path, base: str, *arguments: str, child: str = "unsloth_child.py") -> dict[str, Any]:
    command = [str(python), str(ROOT / "tests/support/others" / child), base, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.unsloth
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-unsloth and no ART_UNSLOTH_PYTHON: make test-unsloth")
@pytest.mark.parametrize("arguments", [("float32",), ("bfloat16",), ("float32", "4bit")], ids=" ".join)
def test_the_real_one_trains_as_torch_does(arguments: tuple[str, ...], base: str) -> None:
    """On what that machine has. A checkpoint of its is one of ours, and scores the same there."""
    result = run_child(PYTHON, base, *arguments)
    bound = 5e-2 if result["device"] != "cpu" or "bfloat16" in arguments else 1e-5
    assert result["quantized"] == ("4bit" in arguments)
    assert (result["adapter_dtypes"], result["num_trained"]) == (["torch.float32"], 28)
    assert result["gap_before"] <= bound and result["gap_after_loading_its_checkpoint"] <= bound
    assert result["logprob_gap"] <= bound and result["moved"] > 0
    assert result["grad_norms"][0] == pytest.approx(result["grad_norms"][1], rel=bound)
    assert {"adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"} <= set(result["files"])


@pytest.mark.unsloth
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-unsloth and no ART_UNSLOTH_PYTHON: make test-unsloth")
def test_adapters_of_clients_learn_on_the_real_ones_base_as_on_any(base: str) -> None:
    result = run_child(PYTHON, base, child="unsloth_backend.py")
    bound = 1e-5 if result["device"] == "cpu" else 5e-2
    assert result["logprobs"] <= bound and result["weights"] <= bound and result["moved"] > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(unsloth.obstacle() is not None, reason=str(unsloth.obstacle()))
@pytest.mark.parametrize("arguments", [("bfloat16",), ("bfloat16", "4bit")], ids=" ".join)
def test_on_a_gpu_it_trains_on_rows_where_its_attention_ignores_the_tree(arguments: tuple[str, ...], base: str) -> None:
    result = run_child(Path(sys.executable), base, *arguments)
    assert result["device"] == "cuda"
    assert result["logprob_gap"] <= 5e-2
    assert result["grad_norms"][0] == pytest.approx(result["grad_norms"][1], rel=5e-2)
