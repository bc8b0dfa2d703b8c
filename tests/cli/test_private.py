"""What is said in a run is its owner's alone: files are 0600 and directories 0700, whatever the umask lets through."""

import base64
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_cli.cli import app as cli
from art_cli.config.schema import VllmEngineConfig
from art_cli.engines.vllm.vllm_server import OwnServer
from art_cli.judges.ruler.verdict_cache import VerdictCache
from art_cli.models.policy_spec import PolicySpec
from art_cli.runs.durable import LineWriter, new_directory, write_file
from art_cli.runtime.errors import EngineError
from art_cli.runtime.scratch import scratch
from tests.support.paths import LETTERS

CONFIG = str(LETTERS / "config.yaml")


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Everything that is made without a mode of its own is readable and writable by all."""
    before = os.umask(0)
    yield
    os.umask(before)


def readable_by_others(root: Path) -> list[str]:
    """What below `root`, and `root` itself, has a bit for group or others, with its mode."""
    found = [(path, stat.S_IMODE(path.lstat().st_mode)) for path in (root, *root.rglob("*")) if not path.is_symlink()]
    return [f"{path}: {mode:o}" for path, mode in found if mode & 0o077]


CANARY = "sk-canary-0123456789abcdef"
KEYS = ("OPENAI_API_KEY", "ART_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "ART_NODES_SECRET")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What `art train` writes, and what other stages do, under an open umask, with keys in the environment."""
    tmp_path = tmp_path_factory.mktemp("stages")
    runs, out = tmp_path / "runs", tmp_path / "out"
    before = os.umask(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in KEYS:
            patch.setenv(name, CANARY)
        _play(runs, out)
    os.umask(before)
    return runs, out


LEAKY = """
import os
from tests.letters.rollout import rollout as letters
num = 0
async def rollout(policy, scenario):
    global num
    num += 1
    if num % 2:
        raise RuntimeError("403 for https://search.example/?q=a&key=" + os.environ["HF_TOKEN"])
    return await letters(policy, scenario)
"""


def _play(runs: Path, out: Path) -> None:
    agent = runs.parent / "leaky.py"
    agent.write_text(LEAKY)
    leaky = [f"runs={runs}", "train.steps=1", "eval=null", f"rollout.entry={agent}:rollout", "name=leaky"]
    assert cli.run(["train", CONFIG, *leaky]) == 0
    settings = [f"runs={runs}", "train.steps=1", "rollout.group_size=2", "judge=rollout", "eval=null"]
    assert cli.run(["train", CONFIG, *settings]) == 0
    assert cli.run(["generate", CONFIG, *settings, "-o", str(out / "deep" / "played.jsonl")]) == 0
    assert cli.run(["judge", str(out / "deep" / "played.jsonl"), "-o", str(out / "scored.jsonl"), "judge=rollout"]) == 0
    assert cli.run(["step", CONFIG, str(out / "scored.jsonl"), *settings, "-o", str(out / "checkpoint")]) == 0


@pytest.mark.slow
def test_nothing_of_a_run_is_readable_by_others(stages: tuple[Path, Path]) -> None:
    """Trajectories, scores, configuration, checkpoints, base, logs."""
    runs, out = stages
    written = {path.name for path in (*runs.rglob("*"), *out.rglob("*"))}
    assert {"config.json", "metrics.jsonl", "trajectories.jsonl", "scored.jsonl", "lock", "played.jsonl"} < written
    assert {"manifest.json", "adapter_model.safetensors", "tokenizer_config.json"} < written
    assert readable_by_others(runs) == []
    assert readable_by_others(out) == []


@pytest.mark.slow
def test_no_key_of_the_environment_is_in_a_file_of_a_run(stages: tuple[Path, Path]) -> None:
    """Nor its base64 in any alignment, nor its hexadecimal digits."""
    forms = [base64.b64encode(b"x" * shift + CANARY.encode())[4:-4] for shift in range(3)]
    forms += [CANARY.encode(), CANARY.encode().hex().encode()]
    files = [path for root in stages for path in root.rglob("*") if path.is_file()]
    failed = (stages[0] / "leaky/step_0000/trajectories.jsonl").read_text()
    assert "RuntimeError: 403 for https://search.example" in failed
    assert len(files) > 30
    for path in files:
        data = path.read_bytes()
        assert not any(form in data for form in forms), path


async def test_caches_logs_and_temporary_directories_are_private(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path / "cache" / "art" / "verdicts.sqlite")
    cache._db.execute("insert into verdicts values ('k', x'00', 0)")
    assert {path.name for path in (tmp_path / "cache" / "art").iterdir()} >= {"verdicts.sqlite", "verdicts.sqlite-wal"}
    assert readable_by_others(tmp_path / "cache") == []
    cache.close()
    (tmp_path / "python").write_text("#!/bin/sh\necho said\n")
    (tmp_path / "python").chmod(0o700)
    config = VllmEngineConfig(name="vllm", python=tmp_path / "python")
    model = PolicySpec(
        base="org/model",
        dtype="float32",
        vocabulary=64,
        max_length=64,
        lora_rank=8,
        chat_template=None,
        learner_device="cpu",
    )
    with pytest.raises(EngineError, match="said"):
        await OwnServer(config, model, name="policy", log=tmp_path / "logs" / "vllm.log").start()
    assert (tmp_path / "logs" / "vllm.log").read_text() == "said\n"
    assert readable_by_others(tmp_path / "logs") == []
    with scratch("test") as place:
        assert readable_by_others(place) == []


def test_what_is_there_keeps_its_mode_and_exports_are_for_others(tmp_path: Path) -> None:
    """A user who opened a directory or a file to a group has opened it for good, but for files that are replaced."""
    shared = tmp_path / "shared"
    shared.mkdir(0o750)
    (shared / "played.jsonl").touch(0o640)
    with LineWriter(shared / "played.jsonl") as writer:
        writer.append({"a": 1})
    write_file(shared / "config.json", b"{}")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (shared, shared / "played.jsonl")] == [0o750, 0o640]
    with new_directory(tmp_path / "weights", is_private=False) as directory:
        (directory / "model.safetensors").write_bytes(b"")
    assert [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "weights", tmp_path / "weights/model.safetensors")
    ] == [0o777, 0o666]


def test_a_link_in_a_new_directory_does_not_open_or_close_its_target(tmp_path: Path) -> None:
    """A builder may link to a model that others use as well."""
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"weights")
    target.chmod(0o644)
    with new_directory(tmp_path / "base") as directory:
        (directory / "model.safetensors").symlink_to(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


@pytest.mark.parametrize("is_on_line", [True, False])
def test_a_key_on_the_command_line_is_warned_of(
    tmp_path: Path, is_on_line: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ps` shows it to everybody; the warning names what does not, before a run is looked for. It has no key in it."""
    if not is_on_line:
        monkeypatch.setenv("ART_API_KEY", "the-key-of-this-test")
    options = ["--api-key", "the-key-of-this-test"] if is_on_line else []
    assert cli.run(["serve", str(tmp_path / "nothing"), *options]) == 2
    errors = capsys.readouterr().err
    assert "nothing" in errors
    warned = [line for line in errors.splitlines() if "--api-key: anyone on this machine can see it" in line]
    assert len(warned) == is_on_line
    assert "the-key-of-this-test" not in errors
