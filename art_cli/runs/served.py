"""Served: which checkpoints of a run answer live traffic. `art improve` writes it, `art gateway --follow` follows it.

runs/NAME/served.json. Without the file a run has no canary and offers its best checkpoint (run_checkpoints.choose).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from art_cli.runs.durable import lock_directory, read_object, write_file
from art_cli.runtime.errors import DataError, one_line
from art_cli.runtime.lots import is_drawn

SERVED_FILE = "served.json"
CURE = "remove the file, and the run's best checkpoint answers"


class Canary(msgspec.Struct, frozen=True):
    """A candidate on trial. Example: Canary("nights/night_0003/run/checkpoints/step_0012", "9f3c", 0.2, "4b1d")"""

    checkpoint: str  # relative to the run
    policy: str  # digest
    share: float  # of conversations
    salt: str  # random, so each canary gets other conversations

    def answers(self, conversation: str) -> bool:
        """Returns True for `share` of the conversations, always the same for the same conversation."""
        return is_drawn(f"{self.salt}/{conversation}", self.share)


class Served(msgspec.Struct, frozen=True):
    """Example: Served("checkpoints/step_0008", "51ab...", previous=["checkpoints/step_0000"])"""

    checkpoint: str  # the promoted checkpoint, relative to the run
    policy: str  # its digest
    previous: list[str] = []  # checkpoints promoted before, oldest first
    canary: Canary | None = None


def read_served(run: Path) -> Served | None:
    """Returns None if the file is missing. Raises DataError for other content, and for paths out of the run."""
    path = run / SERVED_FILE
    if not path.exists():
        return None
    try:
        served = msgspec.convert(read_object(path, within=run), Served)
    except msgspec.ValidationError as error:
        raise DataError(f"not written by art improve: {one_line(error)}; {CURE}", path) from None
    checkpoints = [served.checkpoint, *served.previous, *([served.canary.checkpoint] if served.canary else [])]
    if outside := [each for each in checkpoints if not (run / each).resolve().is_relative_to(run.resolve())]:
        raise DataError(f"{outside[0]!r} is not in the run; {CURE}", path)
    return served


@contextlib.contextmanager
def changing(run: Path) -> Iterator[None]:
    """Keeps the file as it is for other processes. Raises RunError if one is just changing it."""
    with lock_directory(run / SERVED_FILE, run / "nights" / "served.lock"):
        yield


def write_served(run: Path, served: Served) -> None:
    """The caller is `changing` the file."""
    write_file(run / SERVED_FILE, msgspec.json.format(msgspec.json.encode(served), indent=2) + b"\n")
