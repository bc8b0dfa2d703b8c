"""A run directory received from somebody else: its files are data, and nothing in them chooses what is run here.

Each test runs the command over such a run, and looks for the file that its author's program would have made.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli import app as cli
from art_cli.runs.manifest import hash_files
from art_cli.runs.run_dir import RunDir
from tests.support.processes import forked
from tests.support.servers.served import make_run
from tests.support.standins import fake_vllm

Json = dict[str, Any]


class Received:
    """A run whose author wants `mark` to exist here."""

    def __init__(self, directory: Path) -> None:
        self.run = make_run(directory / "runs" / "theirs", (1,))
        self.mark = directory / "mark"
        self.python = directory / "runs" / "theirs" / "python"
        self.python.write_text(
            f'#!/bin/sh\ntouch "{self.mark}"\nshift 2\nexec "{sys.executable}" "{fake_vllm.__file__}" "$@"\n'
        )
        self.python.chmod(0o755)
        self.code = directory / "runs" / "theirs" / "evil.py"
        self.code.write_text(f"from pathlib import Path\nPath({str(self.mark)!r}).touch()\n")

    def say(self, **engine: Any) -> None:
        config = json.loads(self.run.config_path.read_text())
        self.run.config_path.write_text(json.dumps(config | {"engine": {"name": "vllm", **engine}}))

    def art(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.run(arguments, timeout=240, cwd=self.run.root)


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Received:
    return Received(tmp_path_factory.mktemp("received"))


@contextlib.contextmanager
def served(*command: str) -> Iterator[Json]:
    """What `art serve --json` says when it is ready; the server ends with the block."""
    line = ["serve", *command, "--port", "0", "--json"]
    with forked.Forked(line, stdout=forked.PIPE, stderr=forked.PIPE) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            said = process.stdout.readline()
            assert said, process.stderr.read()
            yield json.loads(said)
        finally:
            process.terminate()
            process.communicate(timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["python", "env", "args"])
def test_a_received_run_chooses_no_program_unless_it_is_trusted(received: Received, key: str) -> None:
    """`engine.python`, LD_PRELOAD in `engine.env`, code by vLLM's own arguments: one line says it, exit code 2."""
    settings: dict[str, Any] = {
        "python": str(received.python),
        "env": {"LD_PRELOAD": "/theirs/library.so"},
        "args": {"worker-cls": "evil.Worker", "trust-remote-code": True},
    }
    received.say(**{key: settings[key], "sleep": 0})
    done = received.art("serve", str(received.run.root), "--engine", "vllm", "--port", "0")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"would run vLLM with engine.{key}={json.dumps(settings[key])}; add --trust" in line
    assert "Traceback" not in done.stderr
    assert not received.mark.exists()


@pytest.mark.slow
def test_what_would_be_run_is_shown_in_one_short_line_without_control_characters(received: Received) -> None:
    received.say(python="/bin/sh\n\x1b[2Kerror: all is well", env={"A": "x" * 10_000})
    done = received.art("serve", str(received.run.root), "--engine", "vllm")
    assert done.returncode == 2
    which, refusal = done.stderr.splitlines()  # the checkpoint that is taken, and why it is not served
    assert which.startswith("policy: checkpoints/step_0001") and refusal.startswith("error: ")
    assert "\x1b" not in done.stderr and len(refusal) < 600


@pytest.mark.slow
def test_a_trusted_run_is_served_as_it_was_trained(received: Received) -> None:
    received.say(python=str(received.python), env={"FAKE_VLLM": "", "OWN": "1"}, args={"enforce-eager": True})
    with served(str(received.run.root), "--engine", "vllm", "--trust") as said:
        assert said["models"][0]["step"] == 1
    assert received.mark.exists()
    received.mark.unlink()


@pytest.mark.slow
def test_an_own_run_is_served_with_the_embedded_engine_by_one_command(tmp_path: Path) -> None:
    """Its base was built by code ("build.py:build"), which is not there and not needed: the built base is."""
    run = make_run(tmp_path / "mine", (1,))
    assert json.loads(run.config_path.read_text())["model"]["base"] == "build.py:build"
    with served(str(run.root), "--engine", "embedded") as said:
        assert said["models"][0]["id"] == "mine"


def rebase(run: RunDir, base: str) -> None:
    change(run.checkpoint_path(1) / "manifest.json", base=base)


def receive(directory: Path, place: str) -> Received:
    """One whose author put code where `place` says."""
    received = Received(directory)
    checkpoint, base = received.run.checkpoint_path(1), received.run.base
    code = received.code.read_text()
    if place == "manifest":
        rebase(received.run, f"{received.code}:build")
    elif place == "adapter":
        rebase(received.run, "")
        change(checkpoint / "adapter_config.json", base_model_name_or_path="evil.py:build")
    elif place == "config":
        maps = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        change(base / "config.json", model_type="theirs", auto_map=maps)
        (base / "evil.py").write_text(code)
    else:
        for home in (base, checkpoint):
            maps = {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}
            change(home / "tokenizer_config.json", tokenizer_class="Theirs", auto_map=maps)
            (home / "evil.py").write_text(code)
    change(checkpoint / "manifest.json", files=hash_files(checkpoint))  # as its author would write it
    return received


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("place", ["manifest", "adapter", "config", "tokenizer"])
def test_no_code_beside_a_model_is_run(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A builder as the base in the manifest or the adapter; a model's own modules (`auto_map`), even to one who says
    yes to every question."""
    received = receive(tmp_path, place)
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    monkeypatch.chdir(received.run.root)
    root = str(received.run.root)
    for arguments in (["export", root, "-o", str(tmp_path / "out")], ["serve", root, "--engine", "embedded"]):
        assert cli.run([*arguments, *(["--port", "0"] if arguments[0] == "serve" else [])]) in (1, 2)
        assert "Traceback" not in capsys.readouterr().err
    assert not received.mark.exists()
