"""The files in examples/machines: each starts `art backend` on its kind of machine, with a key of that tool."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from art_cli.cli.app import app
from tests.support.paths import ROOT

KINDS = {"skypilot": "art.sky.yaml", "kubernetes": "art.yaml", "slurm": "art.sbatch", "modal": "art_app.py"}
FILES = {kind: (ROOT / "examples/machines" / name).read_text() for kind, name in KINDS.items()}
FAKE_ART = f"#!{sys.executable}\nimport json, os, sys\nopen(os.environ['SEEN'], 'w').write(json.dumps(sys.argv[1:]))\n"


def shell(script: str, place: Path, **environment: str) -> list[str]:
    """The arguments that a bash script calls `art` with."""
    (place / "art/bin").mkdir(parents=True)
    for name in ("art", "scontrol"):
        program = place / "art/bin" / name
        program.write_text(FAKE_ART if name == "art" else "#!/bin/sh\n")
        program.chmod(0o700)
    path = f"{place / 'art/bin'}{os.pathsep}{os.environ['PATH']}"
    known = {"PATH": path, "HOME": str(place), "SEEN": str(place / "seen"), "ART_API_KEY": "tml-k", **environment}
    subprocess.run(["bash", "-c", script], cwd=place, env=known, check=True, timeout=30)
    seen: list[str] = json.loads((place / "seen").read_text())
    return seen


def container() -> dict[str, Any]:
    deployment = next(each for each in yaml.safe_load_all(FILES["kubernetes"]) if each["kind"] == "Deployment")
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def arguments(kind: str, place: Path) -> list[str]:
    """The arguments that `art` gets, by the way that each kind of machine starts it."""
    if kind == "skypilot":
        return shell(yaml.safe_load(FILES[kind])["run"], place)
    if kind == "slurm":
        return shell(FILES[kind], place)
    if kind == "kubernetes":
        words = container()["command"]
    else:
        assigned = [node for node in ast.parse(FILES[kind]).body if isinstance(node, ast.Assign)]
        words = ast.literal_eval(assigned[0].value)
    assert words[0] == "art"
    return list(words[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_starts_the_server_for_other_machines_with_options_that_there_are(kind: str, tmp_path: Path) -> None:
    seen = arguments(kind, tmp_path)
    where = "/shared/art" if kind == "slurm" else "/checkpoints"
    rest = ["--host", "0.0.0.0", "--port", "8100", "--checkpoints", where]
    assert seen == ["backend", "--base", "Qwen/Qwen3-8B", *rest]
    command = get_command(app).commands["backend"]  # type: ignore[attr-defined]
    assert {word for word in seen if word.startswith("--")} <= {name for each in command.params for name in each.opts}


def test_the_page_names_each_file() -> None:
    page = (ROOT / "docs/backend.md").read_text()
    assert all(f"(../examples/machines/{name})" in page for name in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_comes_from_the_tools_secrets_and_is_never_in_the_file(kind: str) -> None:
    assert "ART_API_KEY" in FILES[kind] and not re.search(r"tml-\w", FILES[kind])


@pytest.mark.parametrize(("sent", "is_queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_of_slurm_stops_its_server_and_is_queued_again_when_its_time_is_over(
    sent: signal.Signals, is_queued: bool, tmp_path: Path
) -> None:
    server = (
        f"#!{sys.executable} -S\nimport signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\nsignal.sigwait([signal.SIGTERM])\nopen('stopped', 'w').close()\n"
    )
    for name, text in (("art", server), ("scontrol", '#!/bin/sh\necho "$@" > queued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ART_API_KEY": "tml-k", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", FILES["slurm"]], cwd=tmp_path, env=known, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline().startswith("TINKER_BASE_URL=http://") and job.stdout.readline() == "ready\n"
    job.send_signal(sent)
    assert job.wait(20) == 0 and (tmp_path / "stopped").exists()
    job.stdout.close()
    assert (tmp_path / "queued").exists() == is_queued
    assert not is_queued or (tmp_path / "queued").read_text() == "requeue 7\n"
