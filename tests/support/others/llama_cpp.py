"""A Python that has llama-cpp-python, for tests that ask llama.cpp itself.

ART_LLAMA_PYTHON names it, or it is .venv-llama: `python -m venv .venv-llama`, then `.venv-llama/bin/pip install
llama-cpp-python`, which builds llama.cpp with a compiler and cmake. Without either such tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

PYTHON = Path(os.environ.get("ART_LLAMA_PYTHON") or ROOT / ".venv-llama" / "bin" / "python")
PROGRAM = ROOT / "tests" / "serving" / "llama_greedy.py"
needs_llama_cpp = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-llama and no ART_LLAMA_PYTHON")


def ask(**asked: Any) -> dict[str, Any]:
    """Returns what tests/serving/llama_greedy.py answers."""
    done = subprocess.run([PYTHON, PROGRAM], input=json.dumps(asked), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
