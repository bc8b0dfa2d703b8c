"""Interrupts: Ctrl-C and SIGTERM during a run, which end it after what is complete is written."""

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
    """The interrupts of one run. `message` is the error that the run ends with, with the command that continues it."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.num = 0
        self._is_updating = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Raises Interrupted at the first SIGINT or SIGTERM inside; a second one ends the process at once."""
        main = asyncio.current_task()
        assert main is not None

        def interrupt() -> None:
            self.num += 1
            if self.num > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            elif self._is_updating:
                log.warning("interrupted: finishing this update first; once more to stop at once (nothing is lost)")
            elif not main.cancelling():  # a signal while the loop was blocked comes twice: asyncio has cancelled then
                main.cancel()

        # A notebook trains in another thread than the main one, where no signal comes, and cancels the task itself.
        with threads.calling(interrupt):
            try:
                yield
            except asyncio.CancelledError:
                raise Interrupted(self.message) from None

    async def off_loop(self, function: Callable[..., Result], *arguments: Any, **settings: Any) -> Result:
        """Returns the result of `function`, computed in a thread, which an interrupt cannot stop and waits for."""
        self._is_updating = True
        try:
            return await threads.compute(function, *arguments, **settings)
        finally:
            self._is_updating = False

    def stop_if_any(self) -> None:
        """Raises Interrupted if an interrupt came while an update was computed."""
        if self.num:
            raise Interrupted(self.message)


def resume_command(loaded: LoadedConfig, files: RunDir) -> str:
    """Returns the shell command that continues the run, or the sweep that it belongs to."""
    words = ["-m", *loaded.sweep] if loaded.sweep else [*loaded.overrides]
    if files.root.name != loaded.config.name:  # --fresh made it, and would start yet another run
        words = [*loaded.overrides, f"name={files.root.name}"]
    return shlex.join(["art", "train", str(loaded.path), *words])
