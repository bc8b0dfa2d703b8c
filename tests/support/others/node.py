"""npm packages that tests need, each set installed once: the official clients, and what builds the page of art view."""

import fcntl
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import CLIENTS, ROOT

PAGE = ROOT / "art_cli/view/app_src"


def clients() -> Path:
    """The directory of the programs, their packages installed. Skips the test where there is no node."""
    return _with_packages(CLIENTS)


def page_sources() -> Path:
    """The directory of the page's sources, what builds and tests it installed. Skips where there is no node."""
    return _with_packages(PAGE)


def _with_packages(directory: Path) -> Path:
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    with (directory / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # test processes side by side install once
        described: dict[str, dict[str, str]] = json.load(file)
        wanted = described["dependencies"] | described.get("devDependencies", {})
        if wanted != {name: _installed(directory, name) for name in wanted}:
            command = ["npm", "ci", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=240)
    return directory


def _installed(directory: Path, name: str) -> str | None:
    """The version of a package that is there."""
    description = directory / "node_modules" / name / "package.json"
    if not description.exists():
        return None
    version: str = json.loads(description.read_text())["version"]
    return version
