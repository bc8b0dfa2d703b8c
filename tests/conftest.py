"""Set-up of every test session."""

import asyncio
import gc
import os
from collections.abc import Callable
from importlib.util import find_spec

import hypothesis
import pytest
import uvloop
from hypothesis import Phase

from art_cli.cli import app as cli
from art_cli.runtime.gpus import has_nvidia

# Nothing of what is imported becomes garbage, and the collector would look through it again and again.
gc.disable()
# Test models are far too small for a second thread, and threads that wait for a busy core cost twenty times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A busy machine draws examples slowly and runs them slowly, which says nothing of the code.
hypothesis.settings.register_profile("art", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# In CI the examples are the same for the same code, so that half as many do, and the first that fails is shown as it
# is: to look for a smaller one takes minutes where an example trains a model, longer than the test may take.
hypothesis.settings.register_profile(
    "ci",
    hypothesis.settings.get_profile("art"),
    derandomize=True,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
)
hypothesis.settings.load_profile("art")
# No test asks the hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# The files that take minutes, the longest first.
LONGEST = (
    "test_vllm_real.py",
    "test_gpu.py",
    "test_nodes.py",
    "test_parallel_learner.py",
    "test_vllm_serve.py",
    "test_improve.py",
    "test_agents.py",
    "test_page.py",
    "test_prompt_search.py",
    "test_stages.py",
    "test_kill.py",
    "test_plan.py",
)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run in the event loop that the commands run in."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def art(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then others with slow tests, so that no worker begins one when the rest have ended.
    Tests that need a GPU are skipped where torch sees none."""
    long = {item.path for item in items if any(item.get_closest_marker(name) for name in ("slow", "vllm", "agents"))}
    place = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path not in long, place.get(item.path.name, len(LONGEST))))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def pytest_collection_finish() -> None:
    """What was imported stays until the end: the garbage collector begins with what comes from here on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# A GPU that the system shows and torch does not use is an error of a run; the tests are then those of a CPU.
if has_nvidia(os.environ) and not _has_gpu():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
