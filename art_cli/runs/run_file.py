"""A file of a run directory, opened so that its reader ends and reads nothing that lies elsewhere.

A run directory may have been made by somebody else. A FIFO in it would hold its reader for ever, a device would never
end, and a link could lead to any file of this machine.
"""

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

BUFFER = 2**18  # bytes read at a time; lines of trajectories have kilobytes
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


def open_file(path: Path, *, within: Path | None = None, max_bytes: int | None = None) -> BufferedReader:
    """Opens a regular file to read.

    Raises OSError, with the reason as its `strerror`, if there is no such file, it is a directory, a pipe or a device,
    it has more than `max_bytes` bytes, or a link leads out of `within`. `within` itself may be reached by a link.
    """
    place = os.path.realpath(path)
    if within is not None and not Path(place).is_relative_to(os.path.realpath(within)):
        raise OSError(errno.EPERM, f"a link that leads out of {within}", str(path))
    if not stat.S_ISREG(os.stat(place).st_mode):  # opening a device can have an effect
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle = os.open(place, _FLAGS)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {max_bytes} are read", str(path))
    except BaseException:
        os.close(handle)
        raise
    return BufferedReader(FileIO(handle), BUFFER)


def read_file(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """Returns the bytes of a regular file, never more than `max_bytes`. Raises OSError as `open_file` does."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read(max_bytes)


def is_inside(path: Path, within: Path | None) -> bool:
    """Whether the path, its links followed, is a regular file, inside of the directory `within` if that is given."""
    if not path.is_file():
        return False
    return within is None or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within))
