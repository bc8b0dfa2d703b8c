"""Interrupts: Ctrl-C and SIGTERM during a run, which stop the run after complete work is written."""

import asyncio
import contextlib
import logging
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from art_cli.config.compose import LoadedConfig
from art_cli.runs.run_dir import RunDir
from art_cli.runtime import threads
from art_cli.runtime.errors import Interrupted

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Interrupts:
    """One run's interrupts. The run ends with the error `message`, which includes the resume command."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.num = 0
        self._is_updating = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Turns SIGINT or SIGTERM inside the block into Interrupted; a second signal kills the process."""
        main = asyncio.current_task()
        assert main is not None

        def interrupt() -> None:
            self.num += 1
            if self.num > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            elif self._is_updating:
                log.warning("interrupted: finishing this update first; interrupt again to stop now (nothing is lost)")
            elif not main.cancelling():  # a signal during blocking code arrives twice: asyncio has already cancelled
                main.cancel()

        # In a notebook the training thread is not the main thread, receives no signals and cancels the task itself.
        with threads.calling(interrupt):
            try:
                yield
            except asyncio.CancelledError:
                raise Interrupted(self.message) from None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns KeyboardInterrupt, which code outside `handled` gets, into Interrupted."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(self.message) from None

    async def off_loop(self, function: Callable[..., Result], *arguments: Any, **settings: Any) -> Result:
        """Runs `function` in a thread and returns its result. Interrupts wait until it returns."""
        self._is_updating = True
        try:
            return await threads.compute(function, *arguments, **settings)
        finally:
            self._is_updating = False

    def stop_if_any(self) -> None:
        """Raises Interrupted after an interrupt during an update."""
        if self.num:
            raise Interrupted(self.message)


def resume_command(loaded: LoadedConfig, files: RunDir) -> str:
    """Returns the shell command that continues the run or its sweep."""
    words = ["-m", *loaded.sweep] if loaded.sweep else [*loaded.overrides]
    if files.root.name != loaded.config.name:  # a --fresh run; repeating --fresh would start another run
        words = [*loaded.overrides, f"name={files.root.name}"]
    return shlex.join(["art", "train", str(loaded.path), *words])
