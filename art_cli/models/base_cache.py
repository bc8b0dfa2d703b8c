"""The user's cache of converted base models: ~/.cache/art/bases/9f3c..., whose files runs share by hard links.

Every file is hashed when a run takes it, and again each time the run's base is loaded. A damaged entry is converted
again. The files are read-only, because a change of their bytes would change the base of every run that has a link. An
entry may be removed at any time, because a run keeps its own links.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from art_cli.runs.durable import new_directory, remove
from art_cli.runs.manifest import HASHES, verify_built, write_hashes
from art_cli.runtime.errors import CheckpointError
from art_cli.runtime.scratch import user_cache

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**30  # the oldest entries are removed above it; a larger base is kept in its run alone


def take_or_make(key: str, directory: Path, make: Callable[[Path], None]) -> None:
    """Fills the empty `directory` with the entry `key`, or with what `make` writes there, which becomes the entry."""
    entry = user_cache() / "bases" / key
    if _take(entry, directory):
        return
    make(directory)
    with contextlib.suppress(OSError):  # a full disk, or another process that keeps the same
        _keep(directory, entry)


def _take(entry: Path, directory: Path) -> bool:
    """Returns True if the directory has the files of the entry, which verify. Otherwise the directory is empty."""
    try:
        _link_all(entry, directory)
        if not (directory / HASHES).is_file():
            raise CheckpointError(f"no {HASHES}")
        verify_built(directory)
        (directory / HASHES).unlink()
        return True
    except (OSError, CheckpointError) as error:
        if entry.exists():
            log.warning("%s: cannot be used, so that it is removed and made again: %s", entry, error)
            with contextlib.suppress(OSError):
                remove(entry)
        for path in directory.iterdir():
            remove(path)
        return False


def _keep(directory: Path, entry: Path) -> None:
    """Makes the entry of the directory's files, and removes the oldest other ones above MAX_BYTES."""
    left = MAX_BYTES - _size(directory)
    if left < 0 or entry.exists():  # another process made it meanwhile
        return
    with new_directory(entry) as beside:
        _link_all(directory, beside)
        write_hashes(beside)
        for file in beside.iterdir():
            file.chmod(0o400)
    others = sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for other in (each for each in others if each != entry):
        left -= _size(other)
        if left < 0:
            remove(other)


def _link_all(source: Path, directory: Path) -> None:
    shutil.copytree(source, directory, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
