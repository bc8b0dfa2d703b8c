"""Files that survive a kill: records as JSON lines, whole files, whole directories, and the lock of a directory.

Appends are flushed line by line. Whole files and directories are written beside their place, fsynced and renamed.
Reading tolerates a torn last line and refuses any other damage with `file:line`.
"""

import contextlib
import errno
import fcntl
import functools
import io
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from art_cli.runs import json_lines
from art_cli.runs.json_lines import read_file
from art_cli.runs.trajectory import SCHEMA_VERSION
from art_cli.runtime.errors import DataError, RunError, one_line
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.scratch import make_directory, owner_only

log = logging.getLogger(__name__)
Record = TypeVar("Record")

HOLD_TRIES = 20  # number of times that a file is opened again because it was replaced while it was being locked
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems that have no locks
TAIL_BYTES = 2**16  # bytes read at a time, from the end, in search of the last line
MAX_OBJECT_BYTES, MAX_OBJECT_DEPTH = 16 * 2**20, 64  # a configuration has a few kilobytes and five levels


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_lines(path: Path, kind: type[Record], *, within: Path | None = None) -> Iterator[Record]:
    """Yields the records of a JSON-lines file, one at a time; none if there is no such file.

    `within`: the run's directory, out of which a link may not lead.

    A last line that breaks off is torn, because its writer was killed, and is left out. Raises DataError with the
    line: it is not a `kind`, or its `schema_version` is newer than this program's.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    for number, _, line in json_lines.lines(path, within=within):
        if json_lines.is_torn(line):
            _warn_of_torn(path, number)
            return
        try:
            record = json_lines.decode(line, decoder)
        except ValueError as error:
            raise DataError(_explain(error, line), path, number) from error
        version = getattr(record, "schema_version", SCHEMA_VERSION)
        if version > SCHEMA_VERSION:
            raise DataError(newer_schema(version), path, number)
        yield record


@functools.lru_cache(maxsize=1000)
def _warn_of_torn(path: Path, number: int) -> None:
    """Warns once of each line, however often its file is read."""
    log.warning("%s:%d: the last line is torn; left out", path, number)


class _Version(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def _explain(error: Exception, line: bytes) -> str:
    """Returns the reason why a line cannot be read: the error, or that a newer program wrote it."""
    with contextlib.suppress(ValueError):
        version = json_lines.decode(line, msgspec.json.Decoder(_Version)).schema_version
        if version > SCHEMA_VERSION:
            return newer_schema(version)
    return f"{error}; mend the line, or remove it"


def newer_schema(version: int) -> str:
    """Returns the message that refuses a record of schema `version`."""
    return f"written by a newer art (schema {version}, this one reads up to {SCHEMA_VERSION}); upgrade art"


class LineWriter:
    """Appends records to a JSON-lines file; each is flushed to the system before `append` returns.

    Opening locks the file for as long as this process lives, and cuts off a torn last line, so that the next record
    starts on a line of its own. `is_fresh` empties the file once it is locked.

    Raises RunError: another writer holds the lock; DataError: this class did not write the end of the file.
    """

    def __init__(self, path: Path, *, is_fresh: bool = False) -> None:
        self.path = path
        make_directory(path.parent)
        self._file = _hold(path)
        try:
            if is_fresh:
                self.truncate(0)
            _mend_tail(self._file.fileno(), path)
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()  # keeps lines whole when several threads write

    def append(self, record: Any) -> None:
        self.append_all([record])

    def append_all(self, records: Iterable[Any]) -> None:
        """Appends all of them at once. Raises OSError (a full disk) after removing what was written of them."""
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        with self._lock:
            start = os.fstat(self._file.fileno()).st_size
            try:
                view = memoryview(lines)
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                os.ftruncate(self._file.fileno(), start)
                raise

    def sync(self) -> None:
        """Returns when all that was appended is on the disk. Raises OSError: the disk could not take it."""
        os.fdatasync(self._file.fileno())

    def truncate(self, size: int) -> None:
        """Cuts the file off after `size` bytes."""
        os.ftruncate(self._file.fileno(), size)

    def is_in_place(self) -> bool:
        """Returns True if `path` still names the file that is written; false after it was removed or replaced."""
        return _is_at(self._file.fileno(), self.path)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _hold(path: Path) -> io.FileIO:
    """The file, opened for appending and locked; it is made if there is none. Raises RunError: another holds the lock.

    The lock is on the file, not on its name, so a file that was replaced before it was locked is closed again.
    """
    for _ in range(HOLD_TRIES):
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"{path}: another process is writing it; wait for it, or name another file") from None
        except (
            OSError
        ) as error:  # a file system without locks, where the user has to see to it that there is one writer
            log.debug("%s: not locked: %s", path, error)
        if _is_at(file.fileno(), path):
            return file
        file.close()
    raise RunError(f"{path}: other processes keep replacing it; name another file")


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _mend_tail(handle: int, path: Path) -> None:
    """Ends the file with a newline: completes a whole last line, cuts off a torn one.

    Raises DataError: the last line is no record.
    """
    size = os.fstat(handle).st_size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(TAIL_BYTES, start)
        start -= step
        tail = os.pread(handle, step, start) + tail
    tail = tail[tail.rfind(b"\n") + 1 :]
    if not tail:
        return
    if json_lines.is_torn(tail):
        log.warning("%s: cut off a torn last line of %d bytes", path, len(tail))
        os.ftruncate(handle, size - len(tail))
        return
    try:
        json_lines.decode(tail, msgspec.json.Decoder(_Version))
    except ValueError as error:
        raise DataError(f"its last line is no record ({error}); name another file", path) from error
    os.write(handle, b"\n")


_LOCKED = set[Path]()  # the directories that this process has locked


@contextlib.contextmanager
def lock_directory(directory: Path, path: Path) -> Iterator[None]:
    """Locks `directory` for this process by the file `path`. The system releases the lock when the process dies.

    On a file system without locks it warns, and the user has to see to it that there is one process.

    Raises RunError: another process holds the lock, or something else is in the place of its file.
    """
    make_directory(path.parent)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):  # a link's target would be overwritten
        raise RunError(f"{path}: not a regular file; remove it")
    with open(path, "a+", errors="replace", opener=owner_only) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(32).strip()
            raise RunError(
                f"{directory}: in use by process {owner if owner.isdecimal() else '?'}; wait for it or stop it"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: not locked (%s): start one process at a time", directory, error.strerror)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        _LOCKED.add(directory.resolve())
        try:
            yield
        finally:
            _LOCKED.discard(directory.resolve())
            file.truncate(0)  # a process of a container may get the same number again


def is_locked_here(directory: Path) -> bool:
    """Returns whether this process holds the directory's lock."""
    return directory.resolve() in _LOCKED


# --- whole files ------------------------------------------------------------------------------------------------------


def read_object(path: Path, *, within: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises DataError: no such file, too large, not JSON, too deep, or no object.

    `within`: the run's directory, out of which a link may not lead.
    """
    try:
        value = json.loads(read_file(path, max_bytes=MAX_OBJECT_BYTES, within=within))
    except FileNotFoundError:
        raise DataError("not a file" if os.path.lexists(path) else "no such file", path) from None
    except RecursionError:
        raise DataError("nested too deeply", path) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path) from error
    except ValueError as error:
        raise DataError(f"not JSON: {one_line(error)}", path) from error
    if not isinstance(value, dict):
        raise DataError(f"not a JSON object but {type(value).__name__}", path)
    if is_deep(value, MAX_OBJECT_DEPTH):
        raise DataError(f"nested more than {MAX_OBJECT_DEPTH} levels deep", path)
    return value


def write_file(path: Path, data: bytes) -> None:
    """Writes `path` beside its place, fsynced, then renamed, so that a reader sees the old content or the new."""
    _write_pieces(path, [data])


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Writes a whole JSON-lines file, as `write_file` does, with one record in memory at a time."""
    _write_pieces(path, (msgspec.json.encode(record) + b"\n" for record in records))


def _write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    with new_file(path) as file:
        file.writelines(pieces)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields an empty file beside `path`. On a clean exit it is fsynced and replaces `path` by a rename."""
    make_directory(path.parent)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(beside, "wb", opener=owner_only) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def new_directory(path: Path, *, is_private: bool = True) -> Iterator[Path]:
    """Yields an empty directory beside `path`. On a clean exit it is fsynced and replaces `path` by a rename.

    `is_private`: only its owner can read it, whichever program wrote its files.
    """
    make_directory(path.parent)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    beside.mkdir(mode=0o700 if is_private else 0o777)
    try:
        yield beside
        for file in beside.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            if is_private and not file.is_symlink():
                file.chmod(0o700 if file.is_dir() else file.stat().st_mode & 0o600)  # a read-only one stays so
        sync_directory(beside)
        _replace(path, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _replace(path: Path, new: Path) -> None:
    """Renames `new` to `path`. What was there stays whole until then, and is back where the renaming fails."""
    old = new.with_suffix(".old")
    try:
        if os.path.lexists(path):
            path.rename(old)
        new.rename(path)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            old.rename(path)
        raise
    sync_directory(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Removes a directory with its content, a file, or a link but not its target; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
