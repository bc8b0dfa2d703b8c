"""The files in examples/machines and the Dockerfile, read by the tools themselves, in a Python of their own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.tinker.test_machines import FILES

ENVIRONMENT = ROOT / ".venv-machines"
IS_THERE = "ART_MACHINES_PYTHON" in os.environ or (ENVIRONMENT / ".ready").exists()
PYTHON = Path(os.environ.get("ART_MACHINES_PYTHON") or ENVIRONMENT / "bin" / "python").absolute()
pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(not IS_THERE, reason="no .venv-machines and no ART_MACHINES_PYTHON: make test-machines"),
]
READERS = {
    "skypilot": """
import sys, sky, yaml
task = sky.Task.from_yaml_config(
    yaml.safe_load(open(sys.argv[1])), secrets_overrides=[(sys.argv[2], "tml-k")])
(resources,) = task.resources
assert resources.ports == ["8100"] and resources.use_spot, resources
assert list(resources.accelerators.items()) == [("H100", 1)], resources.accelerators
assert list(task.storage_mounts) == ["/checkpoints"], task.storage_mounts
assert list(task.secrets) == [sys.argv[2]], task.secrets
""",
    "kubernetes": """
import sys, yaml, kubernetes_validate
documents = list(yaml.safe_load_all(open(sys.argv[1])))
assert len(documents) >= 3
for document in documents:
    for version in ("1.29", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(document, version, strict=True)
""",
    "slurm": """
import pathlib, subprocess, sys
# SC2016 warns of what looks like a variable in single quotes, which is how an option with a dollar is written.
check = pathlib.Path(sys.executable).with_name("shellcheck")
subprocess.run([check, "--exclude=SC2016", "--severity=style", "--shell=bash", sys.argv[1]], check=True)
""",
    "modal": """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("app", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
needs = made.serve._spec_
assert made.app.name == "art-backend" and needs.gpus == "H100", needs
assert list(needs.volumes) == ["/checkpoints"] and len(needs.secrets) == 1, needs
""",
}


@pytest.mark.parametrize("kind", FILES)
def test_its_own_tool_reads_the_file(kind: str, tmp_path: Path) -> None:
    """SkyPilot reads a bucket's existence from the cloud; only the task is read here."""
    file = tmp_path / "machine.py"
    file.write_text(FILES[kind])
    quiet = {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HOME": str(tmp_path)}
    command = [str(PYTHON), "-c", READERS[kind], str(file), "ART_API_KEY"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [PYTHON.with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
