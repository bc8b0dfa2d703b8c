"""Logging, set up once by the command line: to stderr, one line a record, no secrets.

Modules log with `logging.getLogger(__name__)`; results go to stdout elsewhere, numbers to metrics.jsonl. What is shown
may hold texts of models, providers and files, which must not steer the terminal nor look like a line of ours: records
go through `printable` (errors.py) here, other text where it is written.
"""

import logging
import sys

from art_cli.errors import printable, printable_lines


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
