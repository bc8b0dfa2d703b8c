"""A real vLLM for tests: the Python that has one, and how its server is started for tiny models.

`make setup-vllm` makes .venv-vllm; ART_VLLM_PYTHON names another. Where there is neither, what needs it is skipped.
"""

import os
from pathlib import Path

import pytest

from benchmarks.gpu.sampling import QUICK
from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = Path(os.environ.get("ART_VLLM_PYTHON") or ENVIRONMENT / "bin" / "python")
IS_THERE = "ART_VLLM_PYTHON" in os.environ or (ENVIRONMENT / ".ready").exists()
FLOW = "{" + ", ".join(f"{name}: '{value}'" for name, value in QUICK["env"].items()) + "}"  # for an override
OPTIONS = (  # the same for `art serve`
    *("--engine", "vllm", "--set", f"python={PYTHON}", "--set", "args={enforce-eager: true}"),
    *("--set", f"env={FLOW}"),
)
MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not IS_THERE, reason="no .venv-vllm and no ART_VLLM_PYTHON: make test-vllm"),
]
