"""The official npm client for tests, installed once beside its programs in tests/clients."""

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
        wanted = json.load(file)["dependencies"]["openai"]
        installed = CLIENTS / "node_modules" / "openai" / "package.json"
        if not installed.exists() or json.loads(installed.read_text())["version"] != wanted:
            command = ["npm", "ci", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=CLIENTS, check=True, capture_output=True, timeout=240)
    return CLIENTS
