"""Logging to stderr, one line per record, set up once by the command line. Terminal progress bars.

Modules log with `logging.getLogger(__name__)`. Results go to stdout and numbers to metrics.jsonl, elsewhere. Records
may quote models, providers and files. Such text must not control the terminal or imitate art's messages, so every
record goes through `printable` (errors.py).
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
    """Formats a record on one line, keeping newlines of tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def set_up(*, verbose: bool = False) -> None:
    """Sends records to stderr: INFO and above from this package, WARNING and above from other packages."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname).1s %(name)s: %(message)s" if verbose else "%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("art_cli").setLevel(logging.DEBUG if verbose else logging.INFO)
    # peft imports bitsandbytes if installed, which always warns about a downloadable CPU kernel
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)


def is_verbose() -> bool:
    return logging.getLogger("art_cli").isEnabledFor(logging.DEBUG)


class _Redacted(_Formatter):
    """Formats a line with a timestamp and redacted secrets."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _Kept(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores lines that a full disk refuses, because stderr already has them."""


@contextlib.contextmanager
def kept(path: Path, redact: Callable[[str], str]) -> Iterator[None]:
    """Also appends log records inside the block, and the block's failure, to the file `path`.

    `redact` removes secrets from each line. Records below INFO are included if stderr shows them.
    """
    make_directory(path.parent)
    with open(path, "a", opener=owner_only):  # creates the file with owner-only permissions before the handler opens it
        pass
    handler = _Kept(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Redacted(redact))
    root, ours = logging.getLogger(), logging.getLogger("art_cli")
    level = ours.level
    if ours.getEffectiveLevel() > logging.INFO:  # logging is not set up, for example in a notebook
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
    """Updates a progress bar. `facts` is text shown after the counts."""

    def __call__(self, done: int, total: int, facts: str = "") -> None: ...


Stage = Callable[[str], contextlib.AbstractContextManager[Bar]]  # title -> a function to update the stage's progress
_stage: ContextVar[Stage | None] = ContextVar("stage", default=None)  # set while the panel of `art train` is shown


@contextlib.contextmanager
def showing_stages(stage: Stage) -> Iterator[None]:
    """Redirects `shown_bar` to the panel's stages inside the block."""
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


@contextlib.contextmanager
def shown_bar(title: str) -> Iterator[Bar | None]:
    """Yields an update function for a bar on stderr, if there is a terminal, or in the panel. It disappears later."""
    if (stage := _stage.get()) is not None:
        with stage(title) as bar:
            yield bar
        return
    if not can_draw():
        yield None
        return
    from rich import progress
    from rich.console import Console

    counts = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
    facts = progress.TextColumn("{task.fields[facts]}"), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(*counts, *facts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, facts="")
        yield lambda done, total, facts="": bar.update(task, completed=done, total=total, facts=facts)
