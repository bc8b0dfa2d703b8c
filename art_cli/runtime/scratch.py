"""Scratch: a temporary directory that is removed with its process; files and directories that only their owner reads.

    /tmp/art-serve-k3x9/
      .art-scratch-owner     locked while its process lives; the system frees the lock however the process dies
      base/  vllm.log  ...

Each new one first removes those whose process is dead, also one that was killed. A directory without the lock file is
never touched. When the work in it fails, its logs stay, because the error names them; only the system or the user
removes those.

Runs, verdicts and logs quote people. So every file with such content is opened through `owner_only`, and every
directory for it is made by `make_directory`. Files and directories that exist keep their mode, so a user's `chmod`
lasts. Exported weights are not private, since they are made to be handed on.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

FILE, DIRECTORY = 0o600, 0o700


def owner_only(path: str, flags: int) -> int:
    """Returns an opener for `open`. Example: open(path, "ab", opener=owner_only)."""
    return os.open(path, flags, FILE)


def make_directory(path: Path) -> None:
    """Makes the directory and its missing parents. Raises OSError: it cannot be made, or a file is in the way."""
    for place in reversed([path, *path.parents]):
        if place == path or not place.exists():
            place.mkdir(mode=DIRECTORY, exist_ok=True)


def user_cache() -> Path:
    """Returns the directory of `art` in the user's cache directory (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art"


PREFIX = "art-"
OWNER = ".art-scratch-owner"


class Scratch:
    """An empty directory `path` that only this user can read. Example: Scratch("serve").path is /tmp/art-serve-k3x9."""

    def __init__(self, name: str) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        self._owner = _own(self.path)

    def close(self) -> None:
        """Removes it, unless its logs were kept."""
        if self._owner < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep_logs(self) -> None:
        """Removes everything but the logs, which this module never removes. Without logs it removes everything."""
        if self._owner < 0:
            return
        logs = [path for path in self.path.glob("*.log") if path.is_file() and path.stat().st_size]
        if not logs:
            self.close()
            return
        (self.path / OWNER).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path not in logs:
                path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        os.close(self._owner)
        self._owner = -1


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Yields a Scratch's path. It is removed after the block, except its logs where the block failed."""
    made = Scratch(name)
    try:
        yield made.path
    except Exception:
        made.keep_logs()
        raise
    except BaseException:
        made.close()
        raise
    made.close()


def remove_abandoned() -> None:
    """Removes this user's scratch directories whose process is dead, as far as the system lets it."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _own(directory: Path) -> int:
    """Returns the locked lock file. It gets its name after it is locked, so that no process finds it unlocked."""
    unnamed = directory / f"{OWNER}.new"
    owner = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # the file system has no locks; then the directory is never removed
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(directory / OWNER)
    return owner


def _remove_if_abandoned(directory: Path) -> None:
    """Raises OSError: no lock file, or its owner lives."""
    owner = os.open(directory / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        statuses = [os.fstat(owner), directory.lstat()]
        if not stat.S_ISREG(statuses[0].st_mode) or {status.st_uid for status in statuses} != {os.getuid()}:
            return
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
        log.debug("removed %s: the process that made it was killed", directory)
    finally:
        os.close(owner)
