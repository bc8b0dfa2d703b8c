"""`art export`: merged weights that stand alone and are the policy, or nothing."""

import contextlib
import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from art_cli.cli import app as cli
from art_cli.models.weights import Weights
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import DriftError, UsageError
from art_cli.serving import merged_export as module
from art_cli.serving.merged_export import export, load_source, saved_prompts
from art_cli.serving.served_model import Source, find_source
from tests.support.models.tiny import tiny_weights
from tests.support.servers.served import add_trajectories, make_run

PROMPTS = [list(range(40, 90)), list(range(200, 100, -1)), [7, 7, 7, 250, 9]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(tmp_path_factory.mktemp("runs") / "mine", (1, 2), rewards={1: 0.5, 2: 0.25})
    add_trajectories(made, 1, PROMPTS)
    return made


def reference_logits(run: RunDir, step: int, ids: list[int]) -> torch.Tensor:
    """The logprobs that transformers and peft alone compute from the files."""
    base = transformers.AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    policy = peft.PeftModel.from_pretrained(base, run.checkpoint_path(step))
    with torch.no_grad():
        return policy(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.slow
def test_transformers_loads_it_and_every_logprob_is_the_adapters(run: RunDir, tmp_path: Path) -> None:
    """Logprobs of the whole vocabulary at every position agree, not only of the tokens that the export compares."""
    exported = export(find_source(str(run.root)), tmp_path / "out", dtype="float32", bound=None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.float32
    for ids in PROMPTS:
        with torch.no_grad():
            found = merged(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert float((found - reference_logits(run, 1, ids)).abs().max()) < 1e-4
        assert float((found - reference_logits(run, 2, ids)).abs().max()) > 1e-2  # the other step would be seen
    assert exported.num_prompts == 3
    assert exported.num_tokens == sum(len(ids) - 1 for ids in PROMPTS)
    assert 0 <= exported.mean_gap <= exported.max_gap < 1e-4


def test_the_tokenizer_and_its_template_come_along(run: RunDir, tmp_path: Path) -> None:
    export(find_source(str(run.root)), tmp_path / "out", dtype="float32", bound=None)
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", run.base))
    talk = [{"role": "user", "content": "hé"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    assert ours.chat_template == theirs.chat_template


def test_a_template_that_only_the_adapter_has_is_enough(run: RunDir, tmp_path: Path) -> None:
    bare = shutil.copytree(run.base, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    source = find_source(str(run.root), base=str(bare))
    assert transformers.AutoTokenizer.from_pretrained(bare).chat_template is None
    export(source, tmp_path / "out", dtype="float32", bound=None)
    exported, own = (transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", run.base))
    assert exported.chat_template == own.chat_template is not None


@pytest.mark.slow
def test_the_dtype_is_what_is_written(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is loaded once in that dtype for all prompts, in float32, and as it was written: never more weights at
    once than in float32."""
    loaded: list[tuple[str, int]] = []  # dtype, and number of models in memory
    models: list[weakref.ref[Any]] = []
    load = module.load_source

    def watched(source: Source, dtype: str) -> Weights:
        loaded.append((dtype, sum(model() is not None for model in models)))
        weights = load(source, dtype)
        models.append(weakref.ref(weights.inner_model.get_input_embeddings().weight))
        return weights

    monkeypatch.setattr(module, "load_source", watched)
    exported = export(find_source(str(run.root)), tmp_path / "out", dtype="bfloat16", bound=None)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded == [("bfloat16", 0), ("float32", 0), ("bfloat16", 1)]
    assert 1e-6 < exported.max_gap < 0.5


@pytest.mark.parametrize(("free", "device"), [(1e3, "cpu"), (1e12, "cuda")])
def test_weights_that_the_gpu_does_not_hold_are_loaded_on_the_cpu(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, free: float, device: str
) -> None:
    """In float32 a model takes twice the memory of its training in bfloat16, four times that of its base in 4 bits."""
    made = tiny_weights(lora_rank=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1e12))
    taken: list[str] = []

    def load(*args: object, device: str, **knobs: object) -> Weights:
        taken.append({"auto": "cuda"}.get(device, device))
        return made

    monkeypatch.setattr(module, "load_weights", load)
    load_source(find_source(str(run.root))._replace(adapter=None), "float32")
    assert taken == [device]


def test_weights_that_are_not_the_policy_are_not_exported(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight in the file off by 0.5: the replay sees it, and nothing is left at the output."""
    save = module.save_merged

    def damage(weights: object, directory: Path, dtype: str) -> None:
        save(weights, directory, dtype)  # type: ignore[arg-type]
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.0.self_attn.q_proj.weight"][3, 3] += 0.5
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(module, "save_merged", damage)
    with pytest.raises(DriftError, match="the merged weights are not the policy"):
        export(find_source(str(run.root)), tmp_path / "out", dtype="float32", bound=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("apart", "merged", "is_policy"),
    [
        ([-0.1, -27.0], [-0.10005, -27.0002], True),  # rounding grows with the logprob
        ([-0.1, -0.9], [-0.1, -0.9002], False),
        ([-0.1, -27.0], [-0.1, -27.01], False),
        ([-0.1, -0.9], [-0.1, math.nan], False),
        ([-0.1, -0.9], [-0.1, -math.inf], False),
    ],
)
def test_the_bound_is_of_a_nat_and_of_unlikely_tokens_a_share(
    apart: list[float], merged: list[float], is_policy: bool, tmp_path: Path
) -> None:
    with contextlib.nullcontext() if is_policy else pytest.raises(DriftError):
        module.compare(tmp_path, [apart], [merged], module.BOUNDS["float32"])


def test_the_prompts_are_the_newest_saved_ones_or_the_probe(run: RunDir, tmp_path: Path) -> None:
    assert saved_prompts(run) == PROMPTS
    newer = RunDir(tmp_path / "newer")
    add_trajectories(newer, 1, PROMPTS)
    add_trajectories(newer, 3, PROMPTS[:1])
    assert saved_prompts(newer) == PROMPTS[:1]
    assert saved_prompts(None) == []
    bare = make_run(tmp_path / "bare", (1,))
    assert saved_prompts(bare) == []
    exported = export(find_source(str(bare.root)), tmp_path / "out", dtype="float32", bound=None)
    assert (exported.num_prompts, exported.num_tokens) == (1, 63)


def test_a_trajectory_without_turns_is_no_prompt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add_trajectories(run, 0, PROMPTS[:1])
    failed = Trajectory(id="x", group_id="g", group_size=1, index=0, error="timeout: 1 s")
    write_lines(run.trajectories_path(0), [failed, *run.trajectories(0)])
    assert saved_prompts(run) == PROMPTS[:1]


def test_the_command_says_how_near_it_is_and_writes_the_card(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.run(["export", str(run.root), "-o", str(out), "--best", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(out)
    assert result["max_gap"] < 1e-4
    card = (out / "README.md").read_text()
    for fact in ("| Base model | base |", "| Run | mine |", "| Step | 1 |", "0123456789abcdef", "| reward | 0.5 |"):
        assert fact in card
    assert str(tmp_path.parent) not in card
    assert card.startswith('---\nlibrary_name: "transformers"\n')


@pytest.mark.slow
def test_an_export_can_be_exported_again(run: RunDir, tmp_path: Path) -> None:
    """A whole model is its own base: nothing is merged, the dtype may change."""
    export(find_source(str(run.root)), tmp_path / "one", dtype="float32", bound=None)
    again = export(find_source(str(tmp_path / "one")), tmp_path / "two", dtype="float32", bound=0.0)
    assert again.max_gap == 0.0


def test_mistakes_are_told_before_anything_is_loaded(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = find_source(str(run.root))
    with pytest.raises(UsageError, match="there is something already"):
        export(source, tmp_path, dtype="float32", bound=None)
    with pytest.raises(UsageError, match="--dtype int4: one of float32, bfloat16"):
        export(source, tmp_path / "out", dtype="int4", bound=None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert cli.run(["export", str(run.root), "-o", str(tmp_path / "out"), "--push", "me/mine"]) == 2
    assert "no token for the hub; set HF_TOKEN" in capsys.readouterr().err


class Hub:
    """Stands in for the hub's client: remembers what it is told."""

    calls: list[tuple[str, object]] = []
    failure: Exception | None = None

    def __init__(self, token: str) -> None:
        self.calls.append(("token", token))

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("create", (repo, private, exist_ok)))
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.append(("upload", (repo_id, sorted(path.name for path in folder_path.iterdir()))))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    return lambda failure: monkeypatch.setattr(Hub, "failure", failure)


def test_push_uploads_the_directory_to_a_private_repository(
    run: RunDir, tmp_path: Path, hub: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", str(run.root), "-o", str(tmp_path / "out"), "--push", "me/mine"]) == 0
    assert "pushed to https://hub/me/mine" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert Hub.calls == [("token", "hf_secret"), ("create", ("me/mine", True, True)), ("upload", ("me/mine", names))]


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line_without_the_token(
    run: RunDir, tmp_path: Path, hub: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    hub(OSError("401 for\ntoken hf_secret"))
    assert cli.run(["export", str(run.root), "-o", str(tmp_path / "out"), "--push", "me/mine"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: --push me/mine: 401 for token ***;")
    assert (tmp_path / "out" / "model.safetensors").exists()
