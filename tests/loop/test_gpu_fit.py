"""Decisions by GPU memory: checkpointing, context, vLLM's share, and misfits."""

import json
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli import Finding
from art_cli.cli.preflight.model_checks import open_model
from art_cli.cli.preflight.opened import Opened
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.schema import BaseLearnerConfig, RunConfig, VllmEngineConfig
from art_cli.loop.decide import decide_by_base, read_sizes
from art_cli.loop.gpu_fit import context, describe_use, find_misfit, gpu_use
from art_cli.loop.record import check_record, claim_config, find_clash, follow
from art_cli.models.model_shape import read_shape
from art_cli.models.run_memory import GIB, ModelSize, size_of
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import RunError
from benchmarks.forecasts.fits import LARGER, MODELS, cards, cell, run_of, table
from benchmarks.forecasts.published import published
from tests.loop.test_auto import PLAIN, MachineOf
from tests.support.models.tiny import save_tiny_base
from tests.support.paths import ROOT

GPU = MachineOf(bytes=22.0 * GIB)
SERVED = ("engine=vllm", "learner=torch", "model.dtype=bfloat16")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    save_tiny_base(tmp_path / "base")
    (tmp_path / "config.yaml").write_text(PLAIN)
    return tmp_path


def decided(project: Path, *overrides: str, machine: MachineOf = GPU, **knobs: Any) -> LoadedConfig:
    loaded = load_config(project / "config.yaml", overrides)
    return decide_by_base(loaded, str(project / "base"), machine=machine, **knobs)


def checkpointing(config: RunConfig) -> Any:
    assert isinstance(config.learner, BaseLearnerConfig)
    return config.learner.gradient_checkpointing


def sized(name: str) -> tuple[RunConfig, ModelSize]:
    config = run_of(name)
    return config, size_of(published(config.model.base))


def test_auto_checkpointing_is_a_number_of_tokens_on_a_gpu_and_false_on_a_cpu(project: Path) -> None:
    """The tiny base keeps 3.3 kB a token, so that the number is beyond any pack; with 40 bytes it is every pass."""
    on_gpu = decided(project, *SERVED)
    tokens = checkpointing(on_gpu.config)
    assert isinstance(tokens, int) and tokens > 10**6 and "22.0 GiB" in on_gpu.auto["gradient_checkpointing"]
    on_cpu = decided(project, "learner=torch", machine=MachineOf())
    assert checkpointing(on_cpu.config) is False and "gradient_checkpointing" not in on_cpu.auto
    assert checkpointing(decided(project, *SERVED, machine=MachineOf(bytes=40.0)).config) == 1
    assert checkpointing(decided(project, *SERVED, "learner.gradient_checkpointing=77").config) == 77
    beside = ("train.max_staleness=1", "loss.off_policy.name=truncate")
    assert checkpointing(decided(project, *SERVED, *beside).config) == 1, "vLLM has the rest of the GPU"


def test_vllm_beside_the_learner_leaves_room_for_a_step_unless_the_user_says_otherwise(project: Path) -> None:
    beside = (*SERVED, "train.max_staleness=1", "loss.off_policy.name=truncate")
    engine = decided(project, *beside).config.engine
    assert isinstance(engine, VllmEngineConfig)
    share = engine.args["gpu-memory-utilization"]
    assert isinstance(share, float) and 0 < share < (22.0 - 1.5) / 22.0, "a step takes 1.5 GiB at least"
    own = decided(project, *beside, "engine.args={gpu_memory_utilization: 0.3}").config.engine
    assert isinstance(own, VllmEngineConfig) and own.args == {"gpu_memory_utilization": 0.3}
    for other in (SERVED, (*beside, "learner.device=cpu"), (*beside, "engine.env={CUDA_VISIBLE_DEVICES: '1'}")):
        alone = decided(project, *other).config.engine
        assert isinstance(alone, VllmEngineConfig) and not alone.args


def test_an_open_context_is_what_the_cache_holds_where_that_is_less_than_the_models(project: Path) -> None:
    """Of 262,144 tokens x 144 KiB = 36 GiB, Qwen3-4B on 22 GiB has room for 17,408; Llama on 80 for all."""
    config, size = sized("qwen3-4b")
    use = gpu_use(config, size, 22.0 * GIB, {})
    length = context(use, 262_144)
    assert length is not None and length % 1024 == 0 and 10_000 < length < 20_000
    assert context(use, length) is None and context(gpu_use(config, size, 139.8 * GIB, {}), 262_144) is None
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_length": length})})
    assert find_misfit(config, size, 22.0 * GIB, {}) is None, "a run with it fits"
    assert decided(project, *SERVED).config.model.max_length is None, "the tiny base has 1,024 tokens"


def test_a_context_that_art_chose_is_recorded_and_kept_on_a_larger_gpu(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_cli.loop.decide.context", lambda use, own: int(use.total // GIB) * 1024)
    first = decided(project, *SERVED)
    assert first.config.model.max_length == 22 * 1024 and "22.0 GiB" in first.auto["max_length"]
    run = RunDir(project / "runs" / "r")
    claim_config(run, first)
    run.checkpoint_path(2).mkdir(parents=True)  # a run without updates accepts a new context
    opened = load_config(project / "config.yaml", SERVED)
    assert not find_clash(run, opened), "what is open is no difference"
    followed = follow(opened, run)
    check_record(run, followed)
    larger = decide_by_base(followed, str(project / "base"), is_begun=True, machine=MachineOf(bytes=80 * GIB))
    assert larger.config.model.max_length == 22 * 1024 and larger.auto["max_length"] == first.auto["max_length"]
    own = load_config(project / "config.yaml", (*SERVED, "model.max_length=4096"))
    with pytest.raises(RunError, match="model.max_length: 22528 -> 4096"):
        check_record(run, follow(own, run))


def test_a_context_that_the_user_wrote_or_that_was_open_before_is_not_taken_from_the_record(project: Path) -> None:
    run = RunDir(project / "runs" / "r")
    claim_config(run, decided(project, *SERVED, "model.max_length=512"))
    run.checkpoint_path(2).mkdir(parents=True)  # a run without updates accepts a new context
    opened = load_config(project / "config.yaml", SERVED)
    assert follow(opened, run).config.model.max_length is None
    assert "model.max_length: 512 -> null" in find_clash(run, opened)
    record = json.loads(run.config_path.read_text())
    for damaged in ("7", -1.5, [8], None):
        record["model"]["max_length"], record["auto"]["max_length"] = damaged, "x"
        run.config_path.write_text(json.dumps(record))
        assert follow(opened, run).config.model.max_length is None
    begun = decided(project, *SERVED, is_begun=True, machine=MachineOf(bytes=3.0 * GIB))
    assert begun.config.model.max_length is None


def test_a_run_that_does_not_fit_names_the_key_that_changes_it() -> None:
    config, size = sized("qwen3-8b")
    found = find_misfit(config, size, 22.0 * GIB, {})
    assert found is not None and found.cure == "model.quantize=4bit" and "GiB" in found.problem
    four = run_of("qwen3-8b", "model.quantize=4bit")
    assert find_misfit(four, size, 22.0 * GIB, {}) is None
    shorter = find_misfit(config, size, 39.4 * GIB, {})
    assert shorter is None or shorter.cure.startswith("model.max_length=")
    assert find_misfit(run_of("qwen3-8b", "engine.args={tensor-parallel-size: 2}"), size, 79.2 * GIB, {}) is None
    whole, of_whole = run_of("qwen3-1.7b", "model.lora=null", "engine={name: embedded}"), sized("qwen3-1.7b")[1]
    offloaded = find_misfit(whole, of_whole, 39.4 * GIB, {})
    assert offloaded is not None and offloaded.cure == "learner.offload_optimizer=true"
    large, of_large = sized("qwen3-14b")
    none = find_misfit(large, of_large, 10.0 * GIB, {})
    assert none is not None and not none.cure


def test_a_local_teacher_and_judges_count_on_the_learners_gpu(project: Path) -> None:
    """Wherever they stand, each model once, in the dtype of their files. With 10 GiB of them, Qwen3-4B on 22 GiB does
    not fit."""
    model = f"{{name: reward_model, model: {save_tiny_base(project / 'judge')}}}"
    shape = read_shape(str(project / "base"))
    num = read_sizes(decided(project), shape, GPU)
    assert num is not None and num.others == 0
    whole = pytest.approx(4 * num.model.parameters, rel=0.1)  # a judge has another head
    for overrides in (
        [f"judge={model}"],
        [f"judge={{name: cascade, first: {model}, then: {{name: ruler}}}}"],
        [f"judge={{name: blend, blend: {{own: 1}}, judges: {{own: {model}}}}}", f"shadow={{two: {{judge: {model}}}}}"],
        ["loss={name: distill, teacher: {model: base}}"],
    ):
        found = read_sizes(decided(project, *overrides), shape, GPU)
        assert found is not None and found.others == whole, overrides
    on_cpu = read_sizes(decided(project, f"judge={model}", "judge.device=cpu"), shape, GPU)
    unknown = read_sizes(decided(project, "judge={name: reward_model, model: ./missing}"), shape, GPU)
    assert on_cpu is not None and unknown is not None and on_cpu.others == unknown.others == 0
    config, size = sized("qwen3-4b")
    misfit = find_misfit(config, size, 22.0 * GIB, {}, 10.0 * GIB)
    assert misfit is not None and "beside 10.0 GiB of a local teacher or judge" in misfit.problem
    told = describe_use(gpu_use(config, size, 79.2 * GIB, {}, 10.0 * GIB), size)
    assert "a local teacher or judge takes about 10.0 GiB of its GPU" in told


def test_check_names_the_share_and_the_experts_without_an_adapter() -> None:
    config, size = sized("qwen3-4b")
    told = describe_use(gpu_use(config, size, 79.2 * GIB, {}), size._replace(experts=128))
    assert "vLLM gets about 0.87 of its GPU, and its cache" in told and "its 128 experts get no adapter" in told
    staleness = ("train.max_staleness=1", "loss.off_policy.name=truncate")
    assert "next to the learner's step (train.max_staleness)" in describe_use(
        gpu_use(run_of("qwen3-4b", *staleness), size, 79.2 * GIB, {}), size
    )
    endpoint = run_of("qwen3-4b", "engine={name: embedded}")
    assert describe_use(gpu_use(endpoint, size, 79.2 * GIB, {}), size) == ""


# --- what is promised -------------------------------------------------------------------------------------------------


def test_the_documented_table_is_the_one_that_the_estimates_give() -> None:
    """`python -m benchmarks.forecasts.fits` prints it."""
    assert table() in (ROOT / "docs" / "running.md").read_text()


def test_every_packaged_model_is_in_the_table() -> None:
    assert set(MODELS) - set(LARGER) == {file.stem for file in (ROOT / "configs" / "model").glob("*.yaml")}


@pytest.mark.parametrize(
    ("hardware", "card", "models"),
    [
        ("gpu-24gb", "gpu-24gb", ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")),
        ("gpu-24gb", "geforce-4090", ("qwen3-4b",)),
        ("h100", "h100", ("qwen3-4b", "qwen3-8b", "qwen3-14b")),
        ("h100", "a100-80gb", ("qwen3-14b",)),
        ("h100x8", "h100", ("qwen3-8b", "qwen3-14b")),
    ],
)
def test_what_a_packaged_hardware_promises_fits(hardware: str, card: str, models: tuple[str, ...]) -> None:
    for model in models:
        config = run_of(model, f"hardware={hardware}", "learner.device=cuda")
        size = size_of(published(config.model.base))
        assert find_misfit(config, size, cards()[card], {}) is None, model
    if hardware == "gpu-24gb":
        config = run_of("qwen3-8b", "hardware=gpu-24gb", "model.quantize=4bit")
        assert cell(config, size_of(published(config.model.base)), cards()[card]) == "fits"


def test_check_refuses_before_anything_is_loaded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And names what does not fit; where the GPU holds the run, its weights are loaded next."""
    (project / "rollout.py").write_text("def rollout(scenario): ...\n")
    (project / "scenarios.jsonl").write_text('{"id": "a"}\n')
    memory = {"bytes": 1.0 * GIB}
    monkeypatch.setattr("art_cli.loop.engine_choice.gpu_bytes", lambda device: memory["bytes"])

    def check() -> tuple[Finding, bool]:
        loaded = load_config(project / "config.yaml", ("engine=embedded", "learner=torch", "model.dtype=float32"))
        opened, finding = open_model(Opened(loaded, project / "scratch"))
        if opened.learner is not None:
            opened.learner.close()
        return finding, opened.weights is not None

    finding, is_loaded = check()
    assert not finding.is_good and "of a GPU of 1.0 GiB" in finding.message and not is_loaded
    memory["bytes"] = 8.0 * GIB
    finding, is_loaded = check()
    assert finding.is_good and is_loaded
