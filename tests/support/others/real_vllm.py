"""A real vLLM for tests: the Python that has one, and how its server is started for tiny models.

`make setup-vllm` makes .venv-vllm; ART_VLLM_PYTHON names another. Where there is neither, what needs it is skipped.
"""

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = Path(os.environ.get("ART_VLLM_PYTHON") or ENVIRONMENT / "bin" / "python")
IS_THERE = "ART_VLLM_PYTHON" in os.environ or (ENVIRONMENT / ".ready").exists()
# For a tiny model: nothing to compile, no threads that wait for each other where cores are shared, and the worker in
# the engine's process, as on one GPU. On a CPU vLLM would start one more process, which imports for 23 s.
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
FLOW = "{" + ", ".join(f"{name}: '{value}'" for name, value in ENV.items()) + "}"  # for an override
QUICK = {"args": {"enforce-eager": True}, "env": ENV}
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
