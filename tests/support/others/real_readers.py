"""A Python with the packages that trackers write for, and with inspect: W&B, TensorBoard, MLflow, trackio, Langfuse.

`make setup-readers` makes .venv-readers; ART_READERS_PYTHON names another. Without either, tests that need it are
skipped.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-readers"
IS_THERE = "ART_READERS_PYTHON" in os.environ or (ENVIRONMENT / ".ready").exists()
PYTHON = Path(os.environ.get("ART_READERS_PYTHON") or ENVIRONMENT / "bin" / "python").absolute()
MARKS = [
    pytest.mark.readers,
    pytest.mark.skipif(not IS_THERE, reason="no .venv-readers and no ART_READERS_PYTHON: make test-readers"),
]


def run(*words: str, home: Path, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
    """Runs that Python. `home` takes what packages keep of their own, so that no two tests share it."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "TRACKIO_DIR": str(home / "trackio"),
        "WANDB_CACHE_DIR": str(home), "WANDB_DATA_DIR": str(home), "WANDB_CONFIG_DIR": str(home),
    }  # fmt: skip
    environment.pop("WANDB_API_KEY", None)
    return subprocess.run(
        [PYTHON, *words], env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=home
    )


def answer(*words: str, home: Path) -> Any:
    """The JSON of the last line that it prints."""
    done = run(*words, home=home)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
