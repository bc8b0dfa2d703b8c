"""A user's own engine class can train; policies that live elsewhere are never loaded."""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from peft import LoraConfig
from transformers import Gemma3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from art_cli.chat.requests import Sampling
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.schema import ModelConfig
from art_cli.engines import EngineTraits, engine_traits, make_engine, proof
from art_cli.loop.run_writer import RunWriter
from art_cli.loop.train import train
from art_cli.models import loading
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import PolicySpec, read_spec, spec_of
from art_cli.models.saved_weights import save_weights
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.manifest import Probe, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ConfigError, EngineError, UsageError
from tests.support.models.tiny import save_tiny_base, tiny_weights
from tests.support.paths import LETTERS
from tests.support.standins import fake_vllm, plain_engine
from tests.support.standins.scripted import Engine, ScriptedBackend

OTHERS = """
class Elsewhere:
    swaps_adapters = True
    def __init__(self, setup):
        self.setup = setup

class Untrained:
    can_train = False

class Broken:
    def __init__(self, setup):
        raise RuntimeError("no such GPU")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """tests/letters with engines in files beside its configuration."""
    project = Path(shutil.copytree(LETTERS, tmp_path / "letters"))
    shutil.copy(plain_engine.__file__, project / "mine.py")
    (project / "others.py").write_text(OTHERS)
    return project


def load(project: Path, *overrides: str) -> LoadedConfig:
    return load_config(project / "config.yaml", [f"runs={project / 'runs'}", "learner.device=cpu", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_from_a_file_beside_the_configuration_trains(project: Path, staleness: int) -> None:
    """After every step its weights are proven; sampled tokens have the learner's logprobs."""
    engine = "engine={entry: 'mine.py:PlainEngine', options: {max_tokens: 4}}"
    loaded = load(
        project,
        engine,
        "train.steps=2",
        "eval=null",
        f"train.max_staleness={staleness}",
        "loss.off_policy.name=truncate",
    )
    run = RunDir(asyncio.run(train(loaded)).root)
    assert json.loads(run.config_path.read_text())["engine"] == {
        "name": "entry",
        "entry": "mine.py:PlainEngine",
        "options": {"max_tokens": 4},
    }
    lines = [line.metrics for line in run.metrics() if line.split == "train"]
    assert [line["num_updates"] for line in lines] == [1, 1]
    assert all(line["probe_gap"] < 1e-5 for line in lines)
    assert staleness > 0 or all(line["logprob_gap"] < 1e-5 for line in lines)
    assert {turn.step for t in run.trajectories(1) for turn in t.turns} <= ({1} if staleness == 0 else {0, 1})


NOTING = """
import json
from pathlib import Path
import mine

class Noting(mine.PlainEngine):
    def note(self, name):
        saved = sorted(path.name for path in Path(self.setup.logs).parent.glob("checkpoints/step_*"))
        with open(Path(__file__).with_name("noted"), "a") as file:
            file.write(f"{name} {saved[-1]}\\n")
    async def sleep(self):
        self.note("sleep")
    async def wake(self):
        self.note("wake")
    async def load(self, checkpoint, step):
        self.note("load")
        await super().load(checkpoint, step)
"""


def test_an_engine_sleeps_until_the_learner_has_measured_and_saved_its_weights(project: Path) -> None:
    """The learner scores the checkpoint's probe, which needs the memory that a wakened engine takes."""
    (project / "noting.py").write_text(NOTING)
    engine = "engine={entry: 'noting.py:Noting', options: {max_tokens: 2}}"
    asyncio.run(train(load(project, engine, "train.steps=1", "eval=null")))
    noted = (project / "noted").read_text().splitlines()
    assert noted == ["load step_0000", "sleep step_0000", "wake step_0001", "load step_0001"]


def test_an_engine_gets_plain_data_and_weights_only_where_it_asks(project: Path, tmp_path: Path) -> None:
    weights = tiny_weights()
    setting = {"name": "policy", "step": 3, "logs": tmp_path, "directory": project}
    elsewhere: Any = make_engine(
        load(project, "engine={entry: 'others.py:Elsewhere'}").config.engine, weights, **setting
    )
    assert elsewhere.setup.policy == spec_of(weights)
    assert (elsewhere.setup.weights, elsewhere.setup.options) == (None, {})
    assert (elsewhere.setup.name, elsewhere.setup.step, elsewhere.setup.logs) == ("policy", 3, tmp_path)
    here: Any = make_engine(load(project, "engine={entry: 'mine.py:PlainEngine'}").config.engine, weights, **setting)
    assert here.setup.weights is weights


@pytest.mark.slow
def test_what_an_engine_can_do_is_said_by_its_class_or_its_section(project: Path) -> None:
    def traits(engine: str) -> EngineTraits:
        return engine_traits(load(project, f"engine={engine}").config.engine, project)

    assert traits("embedded") == EngineTraits(enforces_formats=True, weights="here")
    assert traits("vllm") == EngineTraits(swaps_adapters=True, enforces_formats=True)
    assert traits("{name: openai, url: 'http://x/v1', model: m}") == EngineTraits(
        can_train=False, enforces_formats=True
    )
    assert traits("{entry: 'others.py:Elsewhere'}") == EngineTraits(swaps_adapters=True)
    assert traits("{entry: 'mine.py:PlainEngine'}") == EngineTraits(weights="here")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["engine={entry: 'others.py:Elswhere'}"], ConfigError, "engine.entry.*Elsewhere"),
        (["engine={entry: 'others.py:Untrained'}"], ConfigError, "can_train = False"),
        (["engine={entry: 'others.py:Elsewhere'}", "model.lora=null"], ConfigError, "set model.lora"),
        (["engine={entry: 'others.py:Broken'}"], EngineError, "engine.entry: others.py:Broken: .*no such GPU"),
        (["engine=entry"], ConfigError, "engine.entry"),
    ],
)
def test_an_engine_that_cannot_train_is_refused_in_words(
    project: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(train(load(project, "eval=null", *overrides)))


# --- a policy that lives elsewhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 4])
def test_a_spec_is_the_same_read_from_files_and_from_weights(tmp_path: Path, rank: int | None) -> None:
    base = save_tiny_base(tmp_path / "base")
    config = ModelConfig.model_validate({"base": base, "lora": rank and {"rank": rank}, "dtype": "bfloat16"})
    read = read_spec(config, base, device="cpu")
    assert read == spec_of(load_weights(config, base, device="cpu"))
    assert (read.lora_rank, read.dtype, read.learner_device) == (rank, "bfloat16", "cpu")
    assert read_spec(config, base).learner_device is None


def test_a_base_that_reads_pictures_too_has_the_vocabulary_and_context_of_its_text(tmp_path: Path) -> None:
    base = save_tiny_base(tmp_path / "base")
    text = {"vocab_size": 265, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 777}
    Gemma3Config(text_config=text, vision_config={"hidden_size": 8, "num_hidden_layers": 1}).save_pretrained(base)
    read = read_spec(ModelConfig(base=base, dtype="float32"), base)
    assert (read.vocabulary, read.max_length) == (265, 777)


def test_a_spec_of_a_checkpoint_has_its_adapters_rank(tmp_path: Path) -> None:
    base, adapter = save_tiny_base(tmp_path / "base"), tmp_path / "adapter"
    save_weights(tiny_weights(lora_rank=2), adapter)
    bare = ModelConfig(base=base, lora=None)
    assert read_spec(bare, base, adapter=adapter).lora_rank == 2
    assert read_spec(bare, base, adapter=adapter).lora_targets == ()
    with pytest.raises(UsageError, match="model.base: .*config.json: no such file"):
        read_spec(bare, str(tmp_path / "adapter"))


def test_a_spec_of_a_mixture_of_experts_names_the_adapted_modules(tmp_path: Path) -> None:
    """So that vLLM reserves no adapters for the experts."""
    base, adapter = save_tiny_base(tmp_path / "base"), tmp_path / "adapter"
    save_weights(tiny_weights(lora_rank=2), adapter)
    Qwen3MoeConfig(vocab_size=265, hidden_size=8, num_hidden_layers=1, num_experts=4).save_pretrained(base)
    targets = {name.rpartition(".")[2] for name in LoraConfig.from_pretrained(adapter).target_modules}
    read = read_spec(ModelConfig(base=base, dtype="float32", lora=None), base, adapter=adapter)
    assert set(read.lora_targets) == targets and "q_proj" in targets


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # of PEFT, for the experts
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "self_attn.v_proj"]])
def test_a_mixture_of_experts_has_the_same_targets_read_from_files_and_from_weights(
    tmp_path: Path, targets: Any
) -> None:
    base = save_tiny_base(tmp_path / "base")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=265, head_dim=8, **shape, **experts)).save_pretrained(base)
    config = ModelConfig.model_validate({"base": base, "lora": {"rank": 4, "targets": targets}, "dtype": "float32"})
    read = read_spec(config, base, device="cpu")
    assert read.lora_targets == spec_of(load_weights(config, base, device="cpu")).lora_targets
    assert set(read.lora_targets) >= {"q_proj", "v_proj"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_model_is_loaded_here_where_engine_and_learner_have_processes_of_their_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM samples, two processes train, the loop only talks to them: it loads no weights and makes no model.

    The fake server invents its logprobs, so proof and drift bound are disabled here.
    """
    python = project / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{fake_vllm.__file__}" "$@"\n')
    python.chmod(0o755)
    loaded_here: list[object] = []
    monkeypatch.setattr(loading, "load_weights", lambda *args, **knobs: loaded_here.append(args))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *args, **knobs: loaded_here.append(args))
    probe = Probe(tokens=list(range(fake_vllm.VOCAB)), logprobs=[])
    monkeypatch.setattr(RunWriter, "_probe_before", lambda writer: probe)
    monkeypatch.setattr(proof, "judge", lambda *scores, **knobs: proof.WeightVerdict(0.0, proof.ShownChange(), "", ""))
    calls = project / "calls.jsonl"
    engine = f"engine={{name: vllm, python: {python}, env: {{FAKE_VLLM_CALLS: {calls}}}}}"
    settings = ["train.steps=1", "eval=null", "train.max_logprob_gap=99", "learner.processes=2", "learner=torch"]
    run = RunDir(asyncio.run(train(load(project, engine, *settings))).root)
    assert loaded_here == []
    assert verify_checkpoint(run.checkpoint_path(1)).dtype == "float32"
    first = json.loads(calls.read_text().splitlines()[0])["argv"]
    assert first[first.index("--model") + 1] == str(run.base)
    assert [first[first.index(flag) + 1] for flag in ("--dtype", "--max-lora-rank")] == ["float32", "8"]


def test_a_spec_is_plain_data() -> None:
    spec = spec_of(tiny_weights())
    assert msgspec.json.decode(msgspec.json.encode(spec), type=PolicySpec) == spec


async def test_a_format_is_refused_in_words_by_an_engine_that_would_ignore_it() -> None:
    """Unless the engine's class says `enforces_formats`, JSON that was demanded would come back as free text."""
    backend = ScriptedBackend()
    gateway = Gateway(Engine(backend), defaults=Sampling(), seed=0, max_turns=2, enforces_formats=False)
    key = gateway.open("t1")
    async with gateway.serve() as url, openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(openai.BadRequestError, match="this engine enforces neither response_format"):
            await client.chat.completions.create(**asked, response_format={"type": "json_object"})
        assert backend.requests == []
        assert (await client.chat.completions.create(**asked)).choices[0].message.content == "ok"
