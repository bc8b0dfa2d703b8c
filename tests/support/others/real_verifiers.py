"""A Python with verifiers, which pins packages that others of ours need newer.

`make setup-verifiers` makes .venv-verifiers; ART_VERIFIERS_PYTHON names another. Without either, tests that need it are
skipped.
"""

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-verifiers"
IS_THERE = "ART_VERIFIERS_PYTHON" in os.environ or any(ENVIRONMENT.glob("lib/*/site-packages/verifiers"))
PYTHON = Path(os.environ.get("ART_VERIFIERS_PYTHON") or ENVIRONMENT / "bin" / "python").absolute()
MARKS = [
    pytest.mark.verifiers,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not IS_THERE, reason="no .venv-verifiers and no ART_VERIFIERS_PYTHON: make test-verifiers"),
]
