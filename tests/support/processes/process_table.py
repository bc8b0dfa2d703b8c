"""What the kernel says of other processes: whether one still runs, and which ones it started. Linux only."""

import contextlib
from pathlib import Path


def is_alive(pid: int) -> bool:
    """A zombie is dead: its parent has only not asked for its status yet.

    A process may end while it is asked about: then its file is gone (FileNotFoundError), or reading it fails
    (ProcessLookupError).
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """The children of the process, each followed by its own; those that end meanwhile are left out."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found
