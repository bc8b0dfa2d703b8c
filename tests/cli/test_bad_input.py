"""What a careless user gives to a whole command: each answer is one line that says what and where, and an exit code.

Mistakes inside the configuration itself are in test_config.py and test_cli.py.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_cli.cli import app as cli
from art_cli.runs.run_dir import RunDir
from tests.support.paths import LETTERS

GOOD_ROLLOUT = (LETTERS / "rollout.py").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the letters project that a test can spoil."""
    copy = tmp_path / "project"
    shutil.copytree(LETTERS, copy)
    return copy


@pytest.fixture
def art(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command on the project's config; the exit code and what it said at the end on standard error."""

    def run(*arguments: str) -> tuple[int, str]:
        code = cli.run(list(arguments))
        lines = capsys.readouterr().err.strip().splitlines()
        assert not any("Traceback" in line for line in lines)
        return code, lines[-1]

    return run


def train(art: Callable[..., tuple[int, str]], project: Path, *overrides: str) -> tuple[int, str]:
    return art("train", str(project / "config.yaml"), "train.steps=1", "eval=null", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nothing_of_that_name\n", "rollout.py:1: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (
            GOOD_ROLLOUT.replace("return Outcome", "return 'good' or Outcome"),
            "reward is str 'good'; a rollout returns a number",
        ),
    ],
    ids=["import", "string"],
)
def test_a_rollout_that_cannot_work_stops_the_run(
    art: Callable[..., tuple[int, str]], project: Path, text: str, expected: str
) -> None:
    (project / "rollout.py").write_text(text)
    code, line = train(art, project, "rollout.groups_per_step=5")
    assert code in (1, 2)
    assert expected in line


def test_a_base_model_that_is_not_there_is_named(art: Callable[..., tuple[int, str]], project: Path) -> None:
    code, line = train(art, project, "model.base=no/such-model")
    assert code == 2
    assert (
        "model.base: 'no/such-model' is neither a directory here nor a file.py:function, and the hub could not be "
        "reached" in line
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export", "nope"], "error: 'nope' is not a directory here, and the hub could not be reached"),
        (["serve", "small=no/pe"], "error: 'no/pe' is not a directory here, and the hub could not be reached"),
        (["export", "./nope"], "error: ./nope: no such directory, and not a hub id"),
        (
            ["export", "adapter", "--base", "no/pe"],
            "error: --base 'no/pe' is not a directory here, and the hub could not be reached",
        ),
        (["export", "adapter", "--base", "nope.py:build"], "error: nope.py:build: no such file"),
        (
            ["export", "adapter"],
            "error: adapter: its base model 'no/such' (--base names another) is not a directory here, and the hub",
        ),
    ],
)
def test_what_is_no_model_is_told_in_the_command_lines_own_words(
    art: Callable[..., tuple[int, str]],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(project)
    (project / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "no/such"}
    (project / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    (project / "adapter/adapter_model.safetensors").write_bytes(b"")
    code, line = art(*arguments, *(["-o", "out"] if arguments[0] == "export" else ["--port", "0"]))
    assert code == 2
    assert line.startswith(expected)


def test_trajectories_of_a_newer_schema_are_refused(art: Callable[..., tuple[int, str]], project: Path) -> None:
    newer = project / "scored.jsonl"
    newer.write_text(json.dumps({"schema_version": 99}) + "\n")
    code, line = art("step", str(project / "config.yaml"), str(newer), "-o", str(project / "out"))
    assert code == 1
    assert "scored.jsonl:1: written by a newer art (schema 99" in line
    assert not (project / "out").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    art: Callable[..., tuple[int, str]], project: Path, small_disk: Path
) -> None:
    """1 MB holds the base model and a checkpoint or two; what was written whole before that is still good."""
    code, line = train(art, project, f"runs={small_disk}", "train.steps=40", "train.keep_checkpoints=99")
    assert code == 1
    assert "no space left on the disk" in line
    newest = RunDir(small_disk / "letters").newest_checkpoint()
    assert newest is not None
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    steps = newest[1].step + 2
    code, line = train(art, project, f"runs={small_disk}", f"train.steps={steps}", "train.keep_checkpoints=99")
    assert code == 0, line
    assert RunDir(small_disk / "letters").checkpoint_steps() == list(range(steps + 1))


@pytest.mark.slow
def test_what_stands_at_the_place_of_a_new_file_or_checkpoint_stays(
    art: Callable[..., tuple[int, str]], project: Path
) -> None:
    config, demos = str(project / "config.yaml"), project / "demos.jsonl"
    demos.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    for place in (project, demos):
        code, line = art("sft", config, str(demos), "-o", str(place))
        assert code == 2 and "not a checkpoint, so it is not replaced" in line
    traces = project / "traces.jsonl"
    traces.write_text("mine\n")
    code, line = art("generate", config, "-o", str(traces), "--format", "openai")
    assert code == 2 and "that --format did not write" in line and traces.read_text() == "mine\n"


@pytest.mark.slow
def test_attempts_of_other_settings_are_not_counted_again(
    art: Callable[..., tuple[int, str]], project: Path, tmp_path: Path
) -> None:
    command = ["eval", str(project / "config.yaml"), "-o", str(tmp_path / "played")]
    assert art(*command)[0] == art(*command)[0] == 0
    for changed in ("eval.temperature=0", "rollout.max_turns=9"):
        code, line = art(*command, changed)
        assert code == 2 and "other settings or code" in line
    with open(project / "rollout.py", "a") as file:
        file.write("# another\n")
    assert art(*command)[0] == 2
    (tmp_path / "played" / "settings.json").write_text("{")
    code, line = art(*command)
    assert code == 2 and "not JSON" in line and line.endswith("name another directory with -o")


def test_a_choice_of_checkpoints_needs_a_run(art: Callable[..., tuple[int, str]], project: Path) -> None:
    (project / "gateway.yaml").write_text("engine: {name: openai, base_url: 'http://127.0.0.1:9/v1', model: m}")
    code, line = art("gateway", str(project / "gateway.yaml"), "--last")
    assert code == 2 and line.endswith("--last: engine 'openai' answers with its own model; leave one out")
