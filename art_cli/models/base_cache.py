"""The user's cache of converted base models: ~/.cache/art/bases/9f3c..., shared by runs through hard links.

Every file is hashed when a run takes it, and again each time the run's base is loaded. Damaged entries are converted
again. The files are read-only, because changing their bytes would change the base for every run with a link. Entries
may be removed at any time, because runs keep their own links.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from art_cli.runs.durable import link_or_copy, new_directory, remove
from art_cli.runs.manifest import HASHES, verify_built, write_hashes
from art_cli.runtime.errors import CheckpointError
from art_cli.runtime.scratch import user_cache

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**30  # above this, the oldest entries are removed; larger bases are not cached


def take_or_make(key: str, directory: Path, make: Callable[[Path], None]) -> None:
    """Fills the empty `directory` from the cache entry `key`, or else calls `make` and caches the result."""
    entry = user_cache() / "bases" / key
    if _take(entry, directory):
        return
    make(directory)
    with contextlib.suppress(OSError):  # a full disk, or another process caching the same base
        _keep(directory, entry)


def _take(entry: Path, directory: Path) -> bool:
    """Returns True if the directory was filled with verified files. Otherwise the directory stays empty."""
    try:
        _link_all(entry, directory)
        if not (directory / HASHES).is_file():
            raise CheckpointError(f"no {HASHES}")
        verify_built(directory)
        (directory / HASHES).unlink()
        return True
    except (OSError, CheckpointError) as error:
        if entry.exists():
            log.warning("%s: cannot be used; removed and made again: %s", entry, error)
            with contextlib.suppress(OSError):
                remove(entry)
        for path in directory.iterdir():
            remove(path)
        return False


def _keep(directory: Path, entry: Path) -> None:
    """Creates the entry from the directory's files, and removes the oldest other entries above MAX_BYTES."""
    left = MAX_BYTES - _size(directory)
    if left < 0 or entry.exists():  # another process was faster
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
    shutil.copytree(source, directory, copy_function=link_or_copy, dirs_exist_ok=True)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
