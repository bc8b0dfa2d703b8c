"""The official npm clients for tests, installed once beside its programs in tests/clients."""

import fcntl
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import CLIENTS


def clients() -> Path:
    """The directory of the programs, their packages installed. Skips the test where there is no node."""
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    with (CLIENTS / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # test processes side by side install once
        wanted: dict[str, str] = json.load(file)["dependencies"]
        if wanted != {name: _installed(name) for name in wanted}:
            command = ["npm", "ci", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=CLIENTS, check=True, capture_output=True, timeout=240)
    return CLIENTS


def _installed(name: str) -> str | None:
    """The version of a package that is there."""
    description = CLIENTS / "node_modules" / name / "package.json"
    if not description.exists():
        return None
    version: str = json.loads(description.read_text())["version"]
    return version
