"""Logging, set up once by the command line: to stderr, one line a record, no secrets; and text for a terminal.

Modules log with `logging.getLogger(__name__)`; results go to stdout elsewhere, numbers to metrics.jsonl. What is shown
may hold texts of models, providers and files, which must not steer the terminal nor look like a line of ours: records
go through `printable` here, other text where it is written.
"""

import logging
import re
import sys

# Controls of C0 and C1, line and paragraph separators, marks that turn the writing direction, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_UNPRINTABLE_IN_LINES = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object) -> str:
    """The text on one line, each character that a terminal would act on as its escape: "\\x1b", "\\n", "\\u202e"."""
    return _UNPRINTABLE.sub(_escape, str(text))


def printable_lines(text: str) -> str:
    """The same of a text whose newlines and tabs are ours."""
    return _UNPRINTABLE_IN_LINES.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return found[0].encode("unicode_escape").decode()


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
