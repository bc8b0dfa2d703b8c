"""Logging to stderr, one line a record; the command line sets it up once. The progress bar on a terminal.

Modules log with `logging.getLogger(__name__)`. Results go to stdout and numbers to metrics.jsonl, elsewhere. A record
may quote models, providers and files. Such text must not control the terminal or look like a line of art, so every
record goes through `printable` (errors.py) here.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from art_cli.runtime.errors import printable, printable_lines
from art_cli.runtime.scratch import make_directory, owner_only
from art_cli.runtime.terminal import can_draw


class _Formatter(logging.Formatter):
    """One line a record; a traceback's newlines stay."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def set_up(*, verbose: bool = False) -> None:
    """Sends the package's records to stderr: warnings and above of other packages, everything from INFO of this one."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname).1s %(name)s: %(message)s" if verbose else "%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("art_cli").setLevel(logging.DEBUG if verbose else logging.INFO)
    # peft imports bitsandbytes where it is installed, and that warns each time about a CPU kernel it could download
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)


def is_verbose() -> bool:
    """Returns whether the user asked for details, with --verbose."""
    return logging.getLogger("art_cli").isEnabledFor(logging.DEBUG)


class _Redacted(_Formatter):
    """Lines with the time in front and every secret replaced."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _Kept(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drops a line that a full disk refuses, because it was on stderr."""


@contextlib.contextmanager
def kept(path: Path, redact: Callable[[str], str]) -> Iterator[None]:
    """Appends what is logged inside to the file `path` as well, and the failure that ends it.

    `redact` removes the secrets from a line. Records below INFO are kept if stderr shows them too.
    """
    make_directory(path.parent)
    with open(path, "a", opener=owner_only):  # the file is made readable by its owner only, before the handler opens it
        pass
    handler = _Kept(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Redacted(redact))
    root, ours = logging.getLogger(), logging.getLogger("art_cli")
    level = ours.level
    if ours.getEffectiveLevel() > logging.INFO:  # logging is not set up, as in a notebook
        ours.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, None))
        raise
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)
        handler.close()


class Bar(Protocol):
    """Moves a progress bar. `facts` are words that are shown behind the counts."""

    def __call__(self, done: int, total: int, facts: str = "") -> None: ...


class Stages(Protocol):
    """The display of stages in place of bars: the panel of `art train`."""

    def stage(self, title: str) -> contextlib.AbstractContextManager[Bar]:
        """Returns the function that moves the progress of a stage, for as long as the stage lasts."""


_panel: ContextVar[Stages | None] = ContextVar("panel", default=None)


@contextlib.contextmanager
def showing_stages(panel: Stages) -> Iterator[None]:
    """Inside, `shown_bar` shows progress on that panel."""
    token = _panel.set(panel)
    try:
        yield
    finally:
        _panel.reset(token)


@contextlib.contextmanager
def shown_bar(title: str) -> Iterator[Bar | None]:
    """Yields the function that moves a bar on stderr; None if nothing can be drawn there. The bar is gone at the end.

    Where a panel is shown, it shows the progress.
    """
    if (panel := _panel.get()) is not None:
        with panel.stage(title) as bar:
            yield bar
        return
    if not can_draw():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, facts="")
        yield lambda done, total, facts="": bar.update(task, completed=done, total=total, facts=facts)
