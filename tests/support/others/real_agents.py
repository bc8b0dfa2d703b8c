"""A Python with openai 3, the frameworks of agents and the Claude Agent SDK, and Codex's command line.

`make setup-agents` makes .venv-agents; ART_AGENTS_PYTHON names another. Without either, tests that need it are skipped.
"""

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-agents"
IS_THERE = "ART_AGENTS_PYTHON" in os.environ or any(ENVIRONMENT.glob("lib/*/site-packages/pydantic_ai"))
PYTHON = Path(os.environ.get("ART_AGENTS_PYTHON") or ENVIRONMENT / "bin" / "python").absolute()
CODEX = PYTHON.parent.parent / "node_modules" / ".bin" / "codex"  # needs Node too
MARKS = [
    pytest.mark.agents,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_THERE, reason="no .venv-agents and no ART_AGENTS_PYTHON: make test-agents"),
]


def has(package: str) -> bool:
    """Whether that Python has the package, which an environment made earlier may lack."""
    return any(PYTHON.parent.parent.glob(f"lib/*/site-packages/{package}"))
