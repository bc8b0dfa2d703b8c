"""The rooms that can be taken away: without tinker/ and view/ the rest of the package is whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
LETTERS = ROOT / "tests" / "letters"
IMPORT_ALL = """
import importlib, pkgutil, sys
import art_cli
missing = []
for module in pkgutil.walk_packages(art_cli.__path__, "art_cli."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("art_cli"):
            missing.append(f"{module.name} imports {error.name}")
print(art_cli.__file__)
sys.exit("; ".join(missing) or 0)
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a copy of the package in which tinker/ and view/ are missing."""
    root = tmp_path_factory.mktemp("rooms")
    left_out = shutil.ignore_patterns("*.pyc.*", "tinker", "view")  # what is compiled already comes along
    shutil.copytree(ROOT / "art_cli", root / "art_cli", ignore=left_out)
    for name in ("docs", "recipes", "configs", "pyproject.toml"):
        if (ROOT / name).exists():
            (root / name).symlink_to(ROOT / name)
    shutil.copytree(LETTERS, root / "letters", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=180
    )


def test_every_other_module_can_be_imported(without: Path) -> None:
    found = python(without, "-c", IMPORT_ALL)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip().split("\n")[-1]) == without / "art_cli" / "__init__.py", "not the copy"


@pytest.mark.parametrize("arguments", [["--help"], ["check", "letters/config.yaml"]])
def test_commands_work(without: Path, arguments: list[str]) -> None:
    found = python(without, "-m", "art_cli", *arguments)
    assert found.returncode == 0, found.stderr


def test_a_run_trains_and_is_reported(without: Path) -> None:
    found = python(without, "-m", "art_cli", "train", "letters/config.yaml", "train.steps=1", "eval=null")
    assert found.returncode == 0, found.stderr
    assert (without / "letters" / "runs" / "letters" / "checkpoints" / "step_0001" / "manifest.json").is_file()
    assert python(without, "-m", "art_cli", "report", "letters/runs/letters").returncode == 0


REMOTE = ["learner=tinker", "engine=tinker", "engine.base_url=http://127.0.0.1:9"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["view", "letters/config.yaml"],
        ["backend", "letters/config.yaml"],
        ["train", "letters/config.yaml", *REMOTE, "name=remote"],
    ],
    ids=["view", "backend", "train"],
)
def test_what_is_missing_is_named_in_one_line(without: Path, arguments: list[str]) -> None:
    found = python(without, "-m", "art_cli", *arguments)
    [line] = [line for line in found.stderr.splitlines() if "error" in line]
    room = "view" if arguments[0] == "view" else "tinker"
    assert found.returncode == 1 and line == f"error: art_cli.{room} is not installed here; install art-cli whole"
