"""Scratch: a temporary directory, removed with its process. Also creates files and directories with owner-only access.

    /tmp/art-serve-k3x9/
      .art-scratch-owner     locked while the process lives; the system releases the lock on any kind of death
      base/  vllm.log  ...

Each new Scratch first removes directories left by dead processes. Directories without the lock file are never touched.
When the work fails, logs stay, because the error message names them. Only the system or the user removes these logs.

Runs, verdicts and logs quote people. Files with such content are opened through `owner_only`, and their directories are
created by `make_directory`. Existing files and directories keep their mode, so a user's `chmod` lasts. Exported weights
are not private, because they are meant for sharing.
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


PREFIX = "art-"
OWNER = ".art-scratch-owner"


def owner_only(path: str, flags: int) -> int:
    """An opener for `open`. Example: open(path, "ab", opener=owner_only)."""
    return os.open(path, flags, FILE)


def make_directory(path: Path) -> None:
    """Creates the directory and missing parents. Raises OSError on failure, for example if a file is in the way."""
    for place in reversed([path, *path.parents]):
        if place == path or not place.exists():
            place.mkdir(mode=DIRECTORY, exist_ok=True)


def user_cache() -> Path:
    """Returns art's directory in the user's cache directory (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art"


class Scratch:
    """An empty directory readable only by this user. Example: Scratch("serve").path is /tmp/art-serve-k3x9."""

    def __init__(self, name: str) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        self._owner = _own(self.path)

    def close(self) -> None:
        """Removes the directory unless its logs were kept."""
        if self._owner < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep_logs(self) -> None:
        """Removes everything except the logs. Without logs, removes the directory."""
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
    """Yields a Scratch's path and removes it after the block. If the block fails, logs are kept."""
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
    """Removes this user's scratch directories of dead processes, as permissions allow."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _own(directory: Path) -> int:
    """Creates the lock file and returns its descriptor. It is renamed when locked, so never visible unlocked."""
    unnamed = directory / f"{OWNER}.new"
    owner = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # no locks on this file system; the directory is then never removed
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(directory / OWNER)
    return owner


def _remove_if_abandoned(directory: Path) -> None:
    """Raises OSError if the lock file is missing or its owner is alive."""
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
