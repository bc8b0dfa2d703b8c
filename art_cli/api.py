"""The loop from Python: the stages of the command line as plain calls, also inside a running event loop.

    config = load("config.yaml", "train.steps=3")
    run = train(config)                                    art train
    played = generate(config, checkpoint=run.root)         art generate
    scored = judge(config, played)                         art judge
    taken = step(config, scored, "step_0004")              art step

Calls block until the work is done, and raise the command's ArtError on failure. If an event loop is running (Jupyter),
the work runs in a new thread with another event loop. Interrupting a notebook is like Ctrl-C on a terminal: complete
results are saved.
"""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.loop import stages
from art_cli.loop import train as training
from art_cli.loop.stages import StepTaken
from art_cli.loop.train import TrainResult
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime import threads

Result = TypeVar("Result")


def load(path: Path | str, *overrides: str) -> LoadedConfig:
    """Returns the configuration in a file, with `key=value` overrides as on the command line. Raises ConfigError."""
    return load_config(path, overrides)


def train(config: LoadedConfig, *, fresh: bool = False) -> TrainResult:
    """Trains for `train.steps` steps. Resumes an existing run; `fresh` starts a new run and keeps the old one."""
    return _wait(lambda: training.train(config, is_fresh=fresh))


def generate(
    config: LoadedConfig,
    *,
    checkpoint: Path | str | None = None,
    step: int | None = None,
    output: Path | str | None = None,
) -> list[Trajectory]:
    """Plays a step's scenarios with a checkpoint, a run, or "base".

    `checkpoint` defaults to the best evaluated or newest checkpoint in the configuration's run. `output` is a file for
    the trajectories; trajectories in an existing file are not played again.
    """
    wanted = None if checkpoint is None else Path(checkpoint)
    with tempfile.TemporaryDirectory(prefix="art-generate-") as scratch:
        path = Path(scratch) / "trajectories.jsonl" if output is None else Path(output)
        return _apart(lambda: stages.generate(config, path, checkpoint=wanted, step=step))


def judge(config: LoadedConfig, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
    """Scores the complete groups with the configuration's judge. Raises JudgeError."""
    return _wait(lambda: stages.judge(config, trajectories))


def step(
    config: LoadedConfig,
    scored: Sequence[ScoredTrajectory],
    output: Path | str,
    *,
    checkpoint: Path | str | None = None,
) -> StepTaken:
    """Takes one update on scored trajectories, and writes the checkpoint to `output`."""
    wanted = None if checkpoint is None else Path(checkpoint)
    return _apart(lambda: stages.take_step(config, scored, Path(output), checkpoint=wanted))


# --- with a running event loop ----------------------------------------------------------------------------------------


def _wait(make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs a coroutine, in a new thread if this thread has a running event loop."""
    if not _has_loop():
        return threads.run(make())
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def work() -> Result:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that is run has a task"
        started.set_result((asyncio.get_running_loop(), task))
        return await make()

    def cancel() -> None:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)

    return _in_thread(lambda: threads.run(work()), cancel)


def _apart(function: Callable[[], Result]) -> Result:
    """Calls a function that runs event loops, in a new thread if this thread has a running event loop."""
    return _in_thread(function, lambda: None) if _has_loop() else function()


def _in_thread(function: Callable[[], Result], cancel: Callable[[], None]) -> Result:
    """Calls the function in a thread. An interrupt cancels the call and waits for its end."""
    future = threads.start_in_thread(function)
    try:
        return future.result()
    except KeyboardInterrupt:
        if not future.done():
            cancel()
            future.exception()
        raise


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
