"""The engine that facts speak for, the learner that `auto` names, where the choice stands, and what resumes."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from art_cli.cli import Finding, doctor
from art_cli.cli import app as cli
from art_cli.cli import serve as serve_command
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.schema import EmbeddedEngineConfig, GrpoConfig, RunConfig, TorchLearnerConfig
from art_cli.engines import make_engine
from art_cli.engines.vllm.arguments import VllmFacts, find_vllm
from art_cli.loop.decide import MAX_KL, decide_by_base, decide_engine
from art_cli.loop.engine_choice import AutoChoice, Machine, choose_engine
from art_cli.loop.record import claim_config, read_record
from art_cli.models import loading, precision
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ConfigError, EngineError, RunError, UsageError
from tests.support.models.tiny import save_tiny_base, tiny_weights
from tests.support.paths import LETTERS, ROOT
from tests.support.servers.served import make_run, scripted_source

CONFIG = LETTERS / "config.yaml"
PYTHON = Path(os.environ.get("ART_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
PLAIN = 'model: {base: base}\nrollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\n'
WORKS = VllmFacts(
    python="/venv/python",
    version="0.32.0",
    torch="2.13.0",
    gpus=["H200"],
    architectures=["Qwen3ForCausalLM"],
    quantizations=["bitsandbytes"],
)
UNQUANTIZED = structs.replace(WORKS, quantizations=["fp8"])


@dataclass
class MachineOf(Machine):
    """A machine of facts that a test writes; `asked` are the Pythons whose vLLM was asked for."""

    gpu: bool = True
    modules: tuple[str, ...] = ("vllm", "unsloth")
    facts: VllmFacts = WORKS
    gpus: int = 1
    asked: list[Path | None] = field(default_factory=list)

    bytes: float = 0.0

    def has_gpu(self) -> bool:
        return self.gpu

    def gpu_bytes(self, device: str) -> float:
        return 0.0 if device == "cpu" else self.bytes

    def num_gpus(self) -> int:
        return self.gpus

    def has(self, module: str) -> bool:
        return module in self.modules

    def vllm(self, python: Path | None) -> VllmFacts:
        self.asked.append(python)
        return self.facts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory whose `base` is a model that says what it is."""
    for name, architecture in (("base", "Qwen3ForCausalLM"), ("odd", "OddForCausalLM")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "config.yaml").write_text(PLAIN)
    return tmp_path


def load(project: Path, *overrides: str) -> LoadedConfig:
    return load_config(project / "config.yaml", overrides)


def engine(project: Path, *overrides: str, machine: Machine) -> tuple[str, str]:
    """The engine that auto is, and the reason."""
    resolved = decide_engine(load(project, *overrides), machine)
    return resolved.config.engine.name, resolved.auto["engine"]


# --- the choice -------------------------------------------------------------------------------------------------------


def test_vllm_is_chosen_if_nothing_speaks_against_it() -> None:
    """The checks are ordered: GPU, obstacles in the run, working vLLM; only the last check has a cure."""
    broken = MachineOf(facts=structs.replace(WORKS, version=None, error="broken"))
    assert choose_engine(MachineOf()) == AutoChoice("vllm", f"vLLM {WORKS.version} and a GPU are here")
    assert choose_engine(MachineOf(gpu=False), obstacle="it is odd") == AutoChoice("embedded", "no GPU here")
    assert choose_engine(broken, obstacle="it is odd") == AutoChoice("embedded", "it is odd")
    assert choose_engine(broken).is_broken and choose_engine(broken).cure == "pip install 'art-cli[vllm]'"


def test_a_gpu_without_bfloat16_gets_the_embedded_engine(project: Path) -> None:
    """There `model.dtype: auto` is float32, which vLLM's LoRA kernels do not take."""
    machine = MachineOf(facts=structs.replace(WORKS, has_bfloat16=False))
    assert engine(project, machine=machine) == (
        "embedded",
        "the GPU has no bfloat16, and vLLM's LoRA kernels on a GPU take 16 bits only",
    )


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.lora=null", "model.lora is null, and vLLM swaps LoRA adapters only"),
        ("model.lora.rank=1024", "model.lora.rank is 1024, and vLLM serves 512 at most"),
        ("model.base=build.py:build", "model.base is made by a function, and vLLM knows published architectures only"),
        ("model.dtype=float32", "model.dtype is float32, and vLLM's LoRA kernels on a GPU take 16 bits only"),
        ("model.base=odd", "vLLM 0.32.0 does not serve OddForCausalLM"),
        (
            "model={quantize: 4bit, dtype: float32}",
            "model.dtype is float32, and vLLM's LoRA kernels on a GPU take 16 bits only",
        ),
    ],
)
def test_what_vllm_cannot_serve_is_sampled_by_the_embedded_engine(project: Path, override: str, reason: str) -> None:
    assert engine(project, override, machine=MachineOf()) == ("embedded", reason)


@pytest.mark.parametrize("base", ["elsewhere/unknown", "torn"])
def test_a_base_that_does_not_say_what_it_is_is_no_obstacle(project: Path, base: str) -> None:
    """Whatever is wrong with it, loading it says so."""
    (project / "torn").mkdir()
    (project / "torn" / "config.json").write_text('{"archit')
    assert engine(project, f"model.base={base}", machine=MachineOf())[0] == "vllm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (MachineOf(gpu=False), "no GPU here"),
        (MachineOf(modules=()), "vLLM is not installed"),
        (MachineOf(facts=VllmFacts(python="/p", error="ImportError: x")), "vLLM does not work in /p: ImportError: x"),
        (MachineOf(facts=VllmFacts(python="/p", version="1", torch="2+cpu")), "torch 2+cpu of /p sees no GPU"),
    ],
)
def test_what_the_machine_lacks_is_the_reason(project: Path, machine: MachineOf, reason: str) -> None:
    assert engine(project, machine=machine) == ("embedded", reason)


def test_four_bits_need_the_plugin_and_its_absence_has_one_command_as_cure(project: Path) -> None:
    """vLLM 0.32 does not include bitsandbytes; without the plug-in its server crashes at the start."""
    without, four = MachineOf(facts=UNQUANTIZED), "model.quantize=4bit"
    name, reason = engine(project, four, machine=without)
    assert name == "embedded" and reason.endswith("cannot serve model.quantize=4bit: vllm-bnb-plugin is missing")
    assert choose_engine(without, quantize="4bit").cure == "/venv/python -m pip install vllm-bnb-plugin"
    assert engine(project, four, machine=MachineOf())[0] == engine(project, machine=without)[0] == "vllm"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine={name: vllm, sleep: 2}", "cannot load the weights again when it wakes; set it to 1 or auto"),
        ("model.dtype=float32", "in 4 bits vLLM computes in bfloat16 only; set it to auto, or engine=embedded"),
    ],
)
def test_what_four_bits_exclude_is_refused_by_its_key(project: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(project, "engine=vllm", "model.quantize=4bit", override)


@pytest.mark.parametrize(
    ("machine", "override"),
    [
        (MachineOf(gpu=False), "train.steps=1"),
        (MachineOf(modules=()), "train.steps=1"),
        (MachineOf(), "model.lora=null"),
    ],
)
def test_vllm_is_not_asked_where_something_else_decides(project: Path, machine: MachineOf, override: str) -> None:
    """Asking takes as long as importing it."""
    assert engine(project, override, machine=machine)[0] == "embedded"
    assert machine.asked == []


@pytest.mark.parametrize("overrides", [(), ("learner=auto",), ("learner.name=auto",), ("learner=torch",)])
def test_auto_is_another_name_of_the_torch_learner(project: Path, overrides: tuple[str, ...]) -> None:
    """Unsloth's attention takes no tree, so it computes shared tokens again for each row."""
    assert load(project, *overrides, "learner.device=cpu").config.learner == TorchLearnerConfig(device="cpu")
    record = load(project).config.model_dump(mode="json") | {"learner": {"name": "auto", "packing": "rows"}}
    assert RunConfig.model_validate(record).learner == TorchLearnerConfig(packing="rows")


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        (["engine=embedded"], "float32"),
        (["engine=vllm"], "bfloat16"),
        (["engine=embedded", "model.quantize=4bit"], "bfloat16"),
        ([], "bfloat16"),
    ],
)
def test_a_small_model_has_float32_on_a_gpu_if_its_engine_is_embedded(
    project: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], dtype: str
) -> None:
    monkeypatch.setattr(loading, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(precision, "has_bfloat16_gpu", lambda: True)
    loaded = load(project, *overrides, "train.learning_rate=1e-5")
    base = save_tiny_base(project / "tiny")
    assert decide_by_base(loaded, base).config.model.dtype == dtype


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ([], MAX_KL),
        (["train.max_kl=0.2"], 0.2),
        (["train.max_kl=null"], None),
        (["learner=tinker", "engine={name: tinker, url: 'http://127.0.0.1:1', base_model: tiny}"], None),
    ],
)
def test_a_step_is_bounded_where_weights_can_be_drawn_back(
    project: Path, overrides: list[str], bound: float | None
) -> None:
    loaded = decide_by_base(load(project, "model.dtype=float32", *overrides), save_tiny_base(project / "tiny"))
    assert loaded.config.train.kl_bound == bound
    assert ("max_kl" in loaded.auto) == (not any("max_kl" in each for each in overrides))


@pytest.mark.parametrize(
    ("overrides", "baseline"),
    [
        (["rollout.groups_per_step=4"], "shrunk"),
        (["rollout.groups_per_step=4", "loss.baseline=group"], "group"),
        (["rollout.groups_per_step=4", "judge=ruler"], "group"),
        (["rollout.groups_per_step=4", "rollout.refill=0.5"], "group"),
        (["rollout.groups_per_step=4", "loss.scale_advantages=true"], "group"),
        (["rollout.groups_per_step=8"], "group"),
        (["rollout.groups_per_step=2"], "group"),
    ],
)
def test_a_small_step_of_rewards_that_compare_has_the_shrunk_baseline(
    project: Path, overrides: list[str], baseline: str
) -> None:
    settings = ("model.dtype=float32", "rollout.group_size=4", *overrides)
    loaded = decide_by_base(load(project, *settings), save_tiny_base(project / "tiny"))
    assert isinstance(loaded.config.loss, GrpoConfig) and loaded.config.loss.baseline == baseline
    assert ("baseline" in loaded.auto) == ("loss.baseline=group" not in overrides)


def test_the_knobs_that_all_learners_have_reach_the_one_chosen(project: Path) -> None:
    knobs = "{name: auto, micro_batch_tokens: 64, gradient_checkpointing: true}"
    loaded = load(project, f"learner={knobs}", "learner.packing=rows")
    expected = TorchLearnerConfig(micro_batch_tokens=64, gradient_checkpointing=True, packing="rows")
    assert loaded.config.learner == expected
    assert loaded.config.learner.model_fields_set == {"micro_batch_tokens", "gradient_checkpointing", "packing"}


def test_what_has_a_name_keeps_it_and_has_no_reason(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(project, "engine=embedded", "engine.max_batch=3", "learner=torch")
    machine = MachineOf()
    assert decide_engine(loaded, machine) is loaded
    assert loaded.config.engine == EmbeddedEngineConfig(max_batch=3)
    assert (loaded.auto, machine.asked, caplog.messages) == ({}, [], [])


def test_what_was_not_settled_is_told_and_not_made(project: Path) -> None:
    with pytest.raises(EngineError, match="engine auto is not resolved"):
        make_engine(load(project).config.engine, tiny_weights(), name="x", logs=project)


# --- where it stands --------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    code: int
    out: list[str]
    err: list[str]


Art = Callable[..., Result]


@pytest.fixture
def art(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Art:
    """The command line, on a machine that shows no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out.splitlines(), err.splitlines())

    return run


@pytest.mark.slow
def test_a_run_says_what_it_is_first_and_in_its_configuration_and_resumes(art: Art, tmp_path: Path) -> None:
    settings = [CONFIG, f"runs={tmp_path}", "rollout.groups_per_step=1", "eval=null"]
    lines = [f"art train {CONFIG}", "engine embedded (auto: no GPU here)"]
    done = art("train", *settings, "train.steps=1")
    assert (done.code, done.err[:2], sum("(auto: no GPU" in each for each in done.err)) == (0, lines, 1)
    assert not [said for said in done.err if "packs hold" in said or "is not used" in said]  # --verbose has them
    config = tmp_path / "letters" / "config.json"
    found = json.loads(config.read_text())
    assert found["auto"]["engine"] == "no GPU here" and set(found["auto"]) == {"engine", "dtype", "max_kl", "baseline"}
    assert found["engine"] == {"name": "embedded", "max_batch": 128, "prefill_tokens": 8192}
    assert found["learner"]["name"] == "torch"
    again = art("train", *settings, "train.steps=2")
    assert (again.code, again.err[:2]) == (0, lines)
    found["train"]["steps"] = 2
    assert json.loads(config.read_text()) == found
    assert sorted(RunDir(tmp_path / "letters").checkpoint_steps()) == [0, 1, 2]


@pytest.mark.slow
def test_the_same_machine_gives_the_same_file_and_another_one_goes_on(project: Path) -> None:
    """On a machine without vLLM, the run samples with a different engine; the training is the same.

    Changes to the training are still refused.
    """
    run = RunDir(project / "runs")
    claim_config(run, decide_engine(load(project), MachineOf(modules=("vllm",))))
    before = run.config_path.read_text()
    assert json.loads(before)["auto"]["engine"] == "vLLM 0.32.0 and a GPU are here"
    assert json.loads(before)["engine"]["name"] == "vllm"
    claim_config(run, decide_engine(load(project), MachineOf(modules=("vllm",))))
    assert run.config_path.read_text() == before
    claim_config(run, decide_engine(load(project), MachineOf(gpu=False)))
    found = json.loads(run.config_path.read_text())
    assert (found["engine"]["name"], found["auto"]["engine"]) == ("embedded", "no GPU here")
    run.checkpoint_path(0).mkdir(parents=True)
    changed = decide_engine(load(project, "train.seed=1"), MachineOf())
    with pytest.raises(RunError, match=r"another configuration: train\.seed: 0 -> 1; change"):
        claim_config(run, changed)


# --- knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "override", "line"),
    [
        ("engine: {max_batch: 4}\n", [], "`name: embedded` beside it (engine=embedded)"),
        ("", ["engine.max_batch=4"], "`name: embedded` beside it (engine=embedded)"),
        ("engine: {python: /p}\n", [], "`name: vllm` beside it (engine=vllm)"),
        (
            "engine: {timeout_s: 4}\n",
            [],
            "`name: openai` or `name: anthropic` or `name: vllm` or `name: tinker` beside it (engine=openai)",
        ),
    ],
)
def test_a_knob_of_one_engine_needs_that_engines_name(project: Path, text: str, override: list[str], line: str) -> None:
    (project / "config.yaml").write_text(PLAIN + text)
    with pytest.raises(ConfigError) as caught:
        load(project, *override)
    assert "engine 'auto' has no knobs of one engine; " in str(caught.value)
    assert str(caught.value).endswith(f"needs {line}")


def test_a_policy_that_was_trained_in_float32_is_not_played_by_vllm(project: Path) -> None:
    machine = MachineOf(modules=("vllm",))
    loaded = load(project, "model.dtype=auto", "engine=auto")
    assert decide_engine(loaded, machine).config.engine.name == "vllm"
    assert decide_engine(loaded, machine, trained_in=["bfloat16"]).config.engine.name == "vllm"
    chosen = decide_engine(loaded, machine, trained_in=["bfloat16", "float32"])
    assert (chosen.config.engine.name, chosen.config.model.dtype) == ("embedded", "auto")


# --- art serve, art doctor --------------------------------------------------------------------------------------------


def test_serving_chooses_by_the_same_facts(tmp_path: Path) -> None:
    """vLLM is looked for where `--set python` or the run says; it serves adapters on one base only."""
    source = scripted_source()._replace(base=str(tmp_path))
    machine = MachineOf(modules=())

    def chosen(*knobs: str, num: int = 1, name: str = "auto") -> str:
        return serve_command._choose_engine(name, knobs, [source] * num, machine).name

    assert chosen() == "embedded"
    assert chosen("python=/opt/python") == "vllm"
    assert machine.asked == [Path("/opt/python")]
    machine.modules = ("vllm",)
    assert (chosen(), chosen(num=2), chosen(name="embedded")) == ("vllm", "embedded", "embedded")
    exact = source._replace(dtype="float32")  # which vLLM's adapters on a GPU cannot be
    assert serve_command._choose_engine("auto", [], [exact], machine).name == "embedded"
    machine.gpu = False
    assert chosen() == "embedded"
    run = make_run(tmp_path / "run")
    of_run = scripted_source()._replace(run=run)
    section = {"engine": {"name": "vllm", "python": "/trained/python"}}
    run.config_path.write_text(json.dumps(json.loads(run.config_path.read_text()) | section))
    elsewhere = MachineOf(modules=())
    assert serve_command._choose_engine("auto", [], [of_run], elsewhere, is_trusted=True).name == "vllm"
    assert elsewhere.asked == [Path("/trained/python")]


def test_a_run_that_is_not_trusted_has_no_program_tried(tmp_path: Path) -> None:
    """`auto` runs the recorded Python to inspect its vLLM, but only after showing it and asking."""
    run = make_run(tmp_path / "run")
    of_run = scripted_source()._replace(run=run)
    section = {"engine": {"name": "vllm", "python": "/theirs/python"}}
    run.config_path.write_text(json.dumps(json.loads(run.config_path.read_text()) | section))
    machine = MachineOf(modules=("vllm",))
    for name in ("auto", "vllm"):
        with pytest.raises(UsageError, match=r'would run vLLM with engine.python="/theirs/python"; add --trust'):
            serve_command._choose_engine(name, [], [of_run], machine)
    assert machine.asked == []
    assert serve_command._choose_engine("embedded", [], [of_run], machine).name == "embedded"
    assert serve_command._choose_engine("auto", ["python=/mine/python"], [of_run], machine).name == "vllm"
    assert machine.asked == [Path("/mine/python")]
    machine.gpu = False
    assert serve_command._choose_engine("auto", [], [of_run], machine).name == "embedded"


def test_doctor_says_what_auto_is_and_what_would_change_it() -> None:
    def found(machine: Machine) -> dict[str, Finding]:
        return {finding.name: finding for finding in doctor.check_auto(machine)}

    engine = found(MachineOf())["engine"]
    assert engine == Finding("engine", True, "auto chooses vllm: vLLM 0.32.0 and a GPU are here", "")
    engine = found(MachineOf(gpus=4))["engine"]
    assert engine.message.endswith("are here; 1 server, engine.replicas starts up to 4 on the 4 GPUs")
    engine = found(MachineOf(modules=()))["engine"]
    install = "pip install 'art-cli[vllm]'"
    assert engine == Finding("engine", True, "auto chooses embedded: vLLM is not installed", install)
    engine = found(MachineOf(facts=VllmFacts(python="/p", error="ImportError: x")))["engine"]
    assert engine.state == "broken" and "ImportError: x" in engine.message and engine.cure
    learner = found(MachineOf())["learner"]
    assert learner == Finding("learner", True, "auto chooses torch: it trains packs, and Unsloth one row at a time", "")


# --- a real vLLM, a real GPU ------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm and no ART_VLLM_PYTHON: make test-vllm")
def test_a_real_vllm_says_what_it_serves_and_that_it_sees_no_gpu() -> None:
    facts = find_vllm(PYTHON)
    assert facts.error is None and facts.version
    assert "Qwen3ForCausalLM" in facts.architectures and "OddForCausalLM" not in facts.architectures
    if not facts.gpus:
        problem = choose_engine(MachineOf(facts=facts), python=PYTHON).reason
        assert problem == f"torch {facts.torch} of {PYTHON} sees no GPU"


@pytest.mark.gpu
def test_a_gpu_is_seen_without_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    assert Machine().has_gpu()


def test_a_record_of_an_older_version_has_keys_that_are_gone(project: Path) -> None:
    """With their defaults they make no difference; with other values they do."""
    settings = ["judge.noise=votes", "judge=ruler", "judge.votes=2", "+shadow.own={judge: {name: ruler}}"]
    loaded = load_config(project / "config.yaml", settings)
    run, plain = RunDir(project / "run"), loaded.config.model_dump(mode="json")
    plain["loss"] |= {"entropy_floor": None, "kl_cov": None}
    plain["judge"]["noise"] |= {"ask_again": 0}
    plain["judge"] |= {"aggregate": "mean"}
    plain["shadow"]["own"]["judge"] |= {"aggregate": "mean"}
    run.root.mkdir()
    run.config_path.write_text(json.dumps(plain))
    assert read_record(run).config == loaded.config.model_dump(mode="json")
    plain["loss"]["entropy_floor"] = 0.3
    run.config_path.write_text(json.dumps(plain))
    assert read_record(run).config["loss"]["entropy_floor"] == 0.3
