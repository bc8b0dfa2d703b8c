"""Logging, set up once by the command line: to stderr, one line a record, no secrets.

Modules log with `logging.getLogger(__name__)`; results go to stdout elsewhere, numbers to metrics.jsonl.
"""

import logging
import sys


def set_up(*, verbose: bool = False) -> None:
    """Sends the package's records to stderr: warnings and above of other packages, everything from INFO of ours."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s" if verbose else "%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("art_cli").setLevel(logging.DEBUG if verbose else logging.INFO)
    # imported with peft where it is installed, it warns each time that a CPU kernel it could download is not there
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
