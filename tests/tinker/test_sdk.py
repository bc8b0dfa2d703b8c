"""The official SDK on the server, as it comes: every public method of both versions, each in a Python process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_cli.tinker.server import BackendLimits
from tests.support.paths import ROOT
from tests.support.servers.backend_server import serving, tiny_base

OLD = Path(os.environ.get("ART_TINKER_OLD", ROOT / ".sdk-tinker"))  # the files of 0.24.1, from `make setup-tinker`


def methods(address: str, packages: Path | None) -> dict[str, Any]:
    """What sdk_methods.py found, with the SDK of this environment or with that below `packages`."""
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    script = Path(__file__).with_name("sdk_methods.py")
    environment = {
        **os.environ,
        **path,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "TINKER_BASE_URL": address,
        "TINKER_PROJECT_ID": "p",
    }
    done = subprocess.run(
        [sys.executable, str(script), address], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.24.1", "newest"])
def test_every_method_works_or_is_refused_by_name(version: str, tmp_path: Path) -> None:
    """At least 60 methods of each version that ask the server are supported."""
    packages = OLD if version == "0.24.1" else None
    if packages is not None and not (packages / "tinker").is_dir():
        pytest.skip("the SDK 0.24.1 is not installed: make setup-tinker")
    base = tiny_base(tmp_path / "base")
    base.name = base.weights.base  # the SDK loads the tokenizer from there
    with serving(base, tmp_path / "root", limits=BackendLimits(models=64)) as address:
        found = methods(address, packages)
    assert packages is None or found["version"] == version
    assert not found["failed"], found["failed"]
    assert len(found["supported"]) >= 60, found
