"""The loop from Python, as docs/how-it-works.md shows it: in a script, and inside a running event loop."""

import asyncio
import logging
import re
import shutil
import threading
from concurrent import futures
from pathlib import Path

import pytest

import art_cli
from art_cli.api import _wait
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import ConfigError, Interrupted, UsageError
from tests.support.paths import LETTERS, ROOT

PAGE = (ROOT / "docs" / "how-it-works.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The letters task as the working directory."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow_page(project: Path) -> None:
    """Runs the page's examples in order, like a notebook, and checks their results."""
    names: dict[str, object] = {}
    for example in EXAMPLES:
        exec(example, names)
    run, scored, taken = names["run"], names["scored"], names["taken"]
    assert isinstance(run, art_cli.TrainResult)
    assert isinstance(taken, art_cli.StepTaken)
    assert isinstance(scored, list)
    assert (run.step, set(run.evaluations), RunDir(run.root).checkpoint_steps()[-1]) == (3, {0, 2, 3}, 3)
    assert all(isinstance(t, ScoredTrajectory) and t.reward == t.returned_reward for t in scored)
    assert len(scored) == 12
    best = max(run.evaluations, key=lambda step: (run.evaluations[step]["reward"], step))
    assert (taken.step, taken.checkpoint) == (best + 1, Path("by-hand"))
    assert (project / "by-hand" / "manifest.json").exists()


@pytest.mark.slow
async def test_the_page_works_inside_a_running_event_loop(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow_page(project)
    assert "letters-" in capsys.readouterr().out
    assert art_cli.train(art_cli.load("config.yaml", "train.steps=3")).was_finished


async def test_mistakes_are_raised_where_they_are_made(project: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        art_cli.load("config.yaml", "train.step=3")
    with pytest.raises(UsageError, match="nowhere: no such directory"):
        art_cli.generate(art_cli.load("config.yaml"), checkpoint="nowhere")


async def test_an_interrupted_notebook_lets_the_work_go_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's own thread is told to stop; the coroutine is cancelled, tidies up, and only then it is over."""
    order: list[str] = []
    is_running = threading.Event()

    async def work() -> None:
        is_running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            order.append("tidied up")
            raise Interrupted("stopped") from None

    class Future(futures.Future[object]):
        def result(self, timeout: float | None = None) -> object:
            if self.done():
                return super().result(timeout)
            assert is_running.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr("art_cli.runtime.threads.Future", Future)
    with pytest.raises(KeyboardInterrupt):
        _wait(work)
    assert order == ["tidied up"]


@pytest.mark.slow
def test_the_run_keeps_its_log_without_secrets(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has set logging up. Each start appends to it, including a final failure."""
    monkeypatch.setenv("MY_API_KEY", "sk-quite-secret")
    (project / "rollout.py").write_text(
        "import logging\n"
        "async def rollout(policy, scenario):\n"
        "    logging.getLogger('art_cli.user').info('the key is sk-quite-secret')\n"
        "    await policy.client.chat.completions.create(\n"
        "        model=policy.model, messages=[{'role': 'user', 'content': 'hi'}])\n"
        "    return 1.0\n"
    )
    small = ["rollout.groups_per_step=1", "rollout.group_size=2", "eval=null"]
    run = art_cli.train(art_cli.load("config.yaml", "train.steps=1", *small))
    path = run.root / "logs" / "train.log"
    text = path.read_text()
    assert "the key is ***" in text
    assert "sk-quite-secret" not in text
    assert "no signal" in text
    with pytest.raises(art_cli.ArtError):
        art_cli.train(art_cli.load("config.yaml", "train.steps=2", "loss=dapo", *small))
    after = path.read_text()
    assert after.startswith(text)
    assert "made by another configuration" in after
    assert str(path) not in [getattr(handler, "baseFilename", "") for handler in logging.getLogger().handlers]
