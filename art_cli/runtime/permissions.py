"""Makes files and directories that only their owner can read, because runs, verdicts and logs quote people.

Every file with such content is opened through `owner_only`; every directory for it is made by `make_directory`. Files
and directories that exist keep their mode, so a user's `chmod` lasts. Exported weights are not private, since they are
made to be handed on.
"""

import os
from pathlib import Path

FILE, DIRECTORY = 0o600, 0o700


def owner_only(path: str, flags: int) -> int:
    """Returns an opener for `open`. Example: open(path, "ab", opener=owner_only)."""
    return os.open(path, flags, FILE)


def make_directory(path: Path) -> None:
    """Makes the directory and its missing parents. Raises OSError: it cannot be made, or a file is in the way."""
    for place in reversed([path, *path.parents]):
        if place == path or not place.exists():
            place.mkdir(mode=DIRECTORY, exist_ok=True)
