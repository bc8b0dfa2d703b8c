"""`dtype: auto` depends on the device, never on its load; a run keeps its initial dtype."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from art_cli.config.compose import load_config
from art_cli.config.schema import ModelConfig, RunConfig
from art_cli.learners import make_learner
from art_cli.learners.processes import workers
from art_cli.loop.stage_policy import PolicySource, find_policy, open_policy
from art_cli.loop.train import train
from art_cli.models import precision
from art_cli.models.loading import load_weights
from art_cli.models.weights import count_parameters
from art_cli.runs.manifest import Manifest, manifest_digest, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.serving.served_model import find_source
from art_cli.serving.served_policies import Loader, engine_config
from tests.support.models.tiny import save_tiny_base, tiny_weights
from tests.support.paths import LETTERS

# Three processes decide beside four that compute until this one ends. Their imports are done beforehand.
DECIDE = """
import os, sys
import torch
from transformers import AutoModelForCausalLM
from art_cli.models.precision import choose_dtype
parent = os.getpid()
for _ in range(4):
    if os.fork() == 0:
        while os.getppid() == parent:
            pass
        os._exit(0)
for _ in range(3):
    if (child := os.fork()) == 0:
        print(choose_dtype(sys.argv[1], "cpu").name, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AMX, where every model is large enough for it."""
    monkeypatch.setattr(precision, "has_amx", lambda: True)
    monkeypatch.setattr(precision, "SMALL", 0)


@pytest.mark.slow
def test_three_processes_decide_the_same_on_a_busy_machine(base: str) -> None:
    quiet = precision.choose_dtype(base, "cpu").name
    answers = subprocess.run([sys.executable, "-c", DECIDE, base], capture_output=True, text=True, check=True).stdout
    assert answers.split() == [quiet] * 3


@pytest.mark.gpu
def test_a_gpu_with_tensor_cores_has_bfloat16(base: str) -> None:
    assert precision.choose_dtype(base, "cuda") == ("bfloat16", "the GPU has bfloat16")


def test_what_the_device_has_decides(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (False, True):
        monkeypatch.setattr(precision, "has_amx", lambda has=has: has)
        monkeypatch.setattr(precision, "has_bfloat16_gpu", lambda has=has: has)
        monkeypatch.setattr(precision, "SMALL", 0)
        for device in ("cpu", "cuda", "cuda:1"):
            assert precision.choose_dtype(base, device).name == ("bfloat16" if has else "float32")


@pytest.mark.parametrize(
    ("device", "may_be_exact", "is_small", "dtype"),
    [
        ("cpu", False, True, "float32"),
        ("cpu", True, True, "float32"),
        ("cpu", False, False, "bfloat16"),
        ("cuda", True, True, "float32"),
        ("cuda:1", True, True, "float32"),
        ("cuda", False, True, "bfloat16"),
        ("cuda", True, False, "bfloat16"),
    ],
)
def test_a_small_model_stays_exact_where_the_engine_samples_so(
    base: str, amx: None, monkeypatch: pytest.MonkeyPatch, device: str, may_be_exact: bool, is_small: bool, dtype: str
) -> None:
    """The device has bfloat16. The size is counted without loading the model."""
    size = count_parameters(load_weights(ModelConfig(base=base, lora=None, dtype="float32"), base).model).whole
    monkeypatch.setattr(precision, "SMALL", size + is_small)
    monkeypatch.setattr(precision, "has_bfloat16_gpu", lambda: True)
    assert precision.choose_dtype(base, device, may_be_exact=may_be_exact).name == dtype


def test_weights_are_loaded_as_chosen_and_a_name_is_a_name(base: str, amx: None) -> None:
    chosen = load_weights(ModelConfig(base=base, dtype="auto"), base, device="cpu")
    assert chosen.dtype == chosen.model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert {p.dtype for p in chosen.model.parameters() if p.requires_grad} == {torch.float32}
    assert load_weights(ModelConfig(base=base, dtype="float32"), base).dtype == torch.float32


def test_processes_of_a_learner_take_what_was_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(workers, "parallel_learner", lambda job, logs: given.update(job=job))
    settings = {"name": "x", "model": {"base": "x"}, "learner": {"name": "torch", "processes": 2}}
    settings |= {"engine": {"name": "embedded"}, "rollout": {"entry": "a.py:b", "scenarios": "c.jsonl"}}
    weights = tiny_weights()
    weights.dtype = torch.bfloat16
    make_learner(RunConfig.model_validate(settings), weights)
    assert given["job"].model.dtype == "bfloat16"


# --- a run keeps it ---------------------------------------------------------------------------------------------------


def start(runs: Path, *overrides: str) -> RunDir:
    settings = [f"runs={runs}", "learner.device=cpu", "eval=null", *overrides]
    return RunDir(asyncio.run(train(load_config(LETTERS / "config.yaml", settings))).root)


def recorded(run: RunDir, step: int) -> tuple[str, str, str]:
    """The dtype in config.json, why it is that, and the dtype in a checkpoint."""
    config = json.loads(run.config_path.read_text())
    return config["model"]["dtype"], config["auto"]["dtype"], verify_checkpoint(run.checkpoint_path(step)).dtype


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run started in bfloat16 on a CPU with AMX, then continued on a CPU without AMX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "has_amx", lambda: True)
        patch.setattr(precision, "SMALL", 0)
        run = start(tmp_path_factory.mktemp("runs"), "train.steps=1")
        assert recorded(run, 1) == ("bfloat16", "this CPU has AMX", "bfloat16")
        patch.setattr(precision, "has_amx", lambda: False)
        return start(run.root.parent, "train.steps=2")


@pytest.fixture
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_amx", lambda: False)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_dtype(halves: RunDir) -> None:
    assert recorded(halves, 2) == ("bfloat16", "this CPU has AMX", "bfloat16")


@pytest.mark.slow
def test_a_run_whose_record_is_lost_keeps_the_dtype_of_its_checkpoints(halves: RunDir, no_amx: None) -> None:
    text = halves.config_path.read_text()
    halves.config_path.unlink()
    try:
        assert recorded(start(halves.root.parent, "train.steps=2"), 2)[0] == "bfloat16"
    finally:
        halves.config_path.write_text(text)


@pytest.mark.slow
def test_eval_plays_a_checkpoint_and_its_base_in_their_dtype(halves: RunDir, no_amx: None) -> None:
    loaded = load_config(LETTERS / "config.yaml", [f"runs={halves.root.parent}", "engine=embedded"])
    for wanted in (halves.root, halves.checkpoint_path(1), halves.root / "base", None):
        with open_policy(loaded, find_policy(loaded, wanted)) as weights:
            assert weights.dtype == torch.bfloat16, wanted
    named = load_config(
        LETTERS / "config.yaml", [f"runs={halves.root.parent}", "engine=embedded", "model.dtype=float32"]
    )
    with open_policy(named, PolicySource(halves.checkpoint_path(1), 1)) as weights:
        assert weights.dtype == torch.float32


@pytest.mark.slow
async def test_serve_samples_in_the_runs_dtype(halves: RunDir, no_amx: None, tmp_path: Path) -> None:
    loader = Loader(engine_config("embedded", {}, {}), logs=tmp_path)
    engine: Any = await loader.make(find_source(str(halves.root)))
    try:
        assert [weights.dtype for weights in loader._bases.values()] == [torch.bfloat16]
    finally:
        await engine.close()


@pytest.mark.slow
def test_export_writes_the_runs_dtype_and_what_is_asked_for(art: Any, halves: RunDir, tmp_path: Path) -> None:
    for knobs, dtype in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        code, out, err = art("export", halves.root, "-o", tmp_path / dtype, "--json", *knobs)
        assert code == 0, err
        assert json.loads(out)["dtype"] == dtype
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype


@pytest.mark.slow
def test_a_run_of_an_older_version_goes_on_and_writes_what_it_goes_on_with(tmp_path: Path, no_amx: None) -> None:
    """The record says auto; the manifests have a removed field and lack the dtype."""
    run = start(tmp_path, "train.steps=1")
    record = json.loads(run.config_path.read_text())
    record["model"]["dtype"] = "auto"
    run.config_path.write_text(json.dumps(record))
    for step in (0, 1):
        path = run.checkpoint_path(step) / "manifest.json"
        old = {name: value for name, value in json.loads(path.read_text()).items() if name != "dtype"}
        old |= {"cursor": {"groups": 3}, "digest": ""}
        old["digest"] = manifest_digest(msgspec.json.encode(old))
        path.write_bytes(msgspec.json.encode(old))
    assert recorded(start(tmp_path, "train.steps=2"), 2) == ("float32", "this CPU has no AMX", "float32")
    assert verify_checkpoint(run.checkpoint_path(1)).dtype == ""


def test_a_manifest_is_held_against_its_own_hash_with_every_field(tmp_path: Path) -> None:
    """Hashes from other versions count as well; text that JSON cannot represent is not hashed."""
    data = msgspec.json.encode(Manifest(step=1, base="b", config_hash="h"))
    other = {**msgspec.json.decode(data), "later": 1}
    assert len({manifest_digest(data), manifest_digest(msgspec.json.encode(other))}) == 2
    assert manifest_digest(b'{"later": 1e999}') == manifest_digest(b'{"later": ') == ""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["gpu9", "gpu", "cuda:99", "cuda:", "cuda:-1", "CPU", "meta", "cpu:x", "0", ""])
def test_a_device_that_is_not_there_is_one_line(device: str, art: Any, tmp_path: Path) -> None:
    """The schema rejects devices unknown to torch; loading rejects devices missing on this machine."""
    base = save_tiny_base(tmp_path, hidden=32)
    code, out, errors = art("backend", "--base", str(base), "learner=torch", f"learner.device='{device}'")
    last = errors.strip().splitlines()[-1]
    assert code == 2 and out == "" and "learner.device: " in last and "bug" not in errors, errors
