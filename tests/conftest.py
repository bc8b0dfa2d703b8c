"""Set-up of every test session."""

import os
from importlib.util import find_spec

import pytest

# Test models are far too small for a second thread, and threads that wait for a busy core cost twenty times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where torch sees none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
