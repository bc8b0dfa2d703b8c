"""Logging, set up once by the command line: to stderr, one line a record, no secrets.

Modules log with `logging.getLogger(__name__)`; results go to stdout elsewhere, numbers to metrics.jsonl. What is shown
may hold texts of models, providers and files, which must not steer the terminal nor look like a line of ours: records
go through `printable` (errors.py) here, other text where it is written.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from art_cli.errors import printable, printable_lines
from art_cli.private import make_directory, owner_only


class _Formatter(logging.Formatter):
    """One line a record; a traceback's newlines stay."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def set_up(*, verbose: bool = False) -> None:
    """Sends the package's records to stderr: warnings and above of other packages, everything from INFO of ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(levelname).1s %(name)s: %(message)s" if verbose else "%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("art_cli").setLevel(logging.DEBUG if verbose else logging.INFO)
    # imported with peft where it is installed, it warns each time that a CPU kernel it could download is not there
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)


class _Redacted(logging.Formatter):
    """Lines with the time in front and every secret replaced."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


class _Kept(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that a full disk does not take is left out; it was on stderr."""


@contextlib.contextmanager
def kept(path: Path, redact: Callable[[str], str]) -> Iterator[None]:
    """What is logged inside goes to the end of the file `path` as well; so does the failure that ends it.

    `redact` takes the secrets out of a line. Records below INFO are there where they are on stderr, too.
    """
    make_directory(path.parent)
    with open(path, "a", opener=owner_only):  # it is made for its owner alone, before the handler opens it
        pass
    handler = _Kept(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Redacted(redact))
    root, ours = logging.getLogger(), logging.getLogger("art_cli")
    level = ours.level
    if ours.getEffectiveLevel() > logging.INFO:  # nobody has set logging up: a notebook
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
