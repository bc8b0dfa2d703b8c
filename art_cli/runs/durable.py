"""Files that survive a kill: JSON-lines records, whole files, whole directories, and directory locks.

Each appended line is flushed. Whole files and directories are written to a temporary sibling, fsynced and renamed.
Readers skip a torn last line and report any other damage with `file:line`.
"""

import asyncio
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
_warn_once = functools.lru_cache(maxsize=1000)(log.warning)  # files may be read repeatedly
Record = TypeVar("Record")

HOLD_TRIES = 20  # number of attempts to open and lock a file that others keep replacing
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors from file systems without locks
_LOCKED = set[Path]()  # directories that this process has locked
TAIL_BYTES = 2**16  # bytes per read when searching backwards for the last line
MAX_OBJECT_BYTES, MAX_OBJECT_DEPTH = 16 * 2**20, 64  # a configuration has a few kilobytes and five levels


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_lines(path: Path, kind: type[Record], *, within: Path | None = None) -> Iterator[Record]:
    """Like `read_numbered`, without line numbers."""
    return (record for _, record in read_numbered(path, kind, within=within))


def read_numbered(path: Path, kind: type[Record], *, within: Path | None = None) -> Iterator[tuple[int, Record]]:
    """Yields line numbers and records of a JSON-lines file, one at a time. A missing file yields nothing.

    `within` is the run directory. Links that lead out of it are refused.

    If a kill tore the last line, the line is skipped with a warning. Raises DataError with the line number if a line is
    not a `kind` or its `schema_version` is newer than this program's.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    for number, _, line in json_lines.lines(path, within=within):
        if json_lines.is_torn(line):
            _warn_once("%s:%d: the last line is incomplete; skipped", path, number)
            return
        try:
            record = json_lines.decode(line, decoder)
        except ValueError as error:
            raise DataError(_explain(error, line), path, number) from error
        version = getattr(record, "schema_version", SCHEMA_VERSION)
        if version > SCHEMA_VERSION:
            raise DataError(newer_schema(version), path, number)
        yield number, record


class _Version(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def _explain(error: Exception, line: bytes) -> str:
    """Explains why a line cannot be read: the decoding error, or a newer schema."""
    with contextlib.suppress(ValueError):
        version = json_lines.decode(line, msgspec.json.Decoder(_Version)).schema_version
        if version > SCHEMA_VERSION:
            return newer_schema(version)
    return f"{error}; mend the line, or remove it"


def newer_schema(version: int) -> str:
    """Returns the message that refuses a record of schema `version`."""
    return f"written by a newer art (schema {version}, this one reads up to {SCHEMA_VERSION}); upgrade art"


class LineWriter:
    """Appends records to a JSON-lines file and flushes each append.

    Opening locks the file while this process lives and cuts off a torn last line, so the next record starts on a new
    line. `is_fresh` empties the file after locking it.

    Raises RunError if another writer holds the lock, and DataError if the file ends in something else.
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
        """Appends all records together. On OSError (such as a full disk) it removes the partial write and raises."""
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
        """Waits until everything appended is on disk. Raises OSError if the disk fails."""
        os.fdatasync(self._file.fileno())

    def truncate(self, size: int) -> None:
        os.ftruncate(self._file.fileno(), size)

    def is_in_place(self) -> bool:
        """Returns whether `path` still names the open file. It does not after a removal or replacement."""
        return _is_at(self._file.fileno(), self.path)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SharedSync:
    """Lets concurrent tasks of an event loop wait for one fsync of a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer
        self._num_appended = self._num_synced = 0
        self._syncing: asyncio.Task[None] | None = None

    def append(self, record: Any) -> None:
        self._writer.append(record)
        self._num_appended += 1

    async def sync(self) -> None:
        """Waits until all earlier appends are on disk. Raises OSError if the disk fails."""
        needed = self._num_appended
        while self._num_synced < needed:
            if self._syncing is None or self._syncing.done():
                self._syncing = asyncio.create_task(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        num = self._num_appended
        await asyncio.to_thread(self._writer.sync)
        self._num_synced = max(self._num_synced, num)

    async def settle(self) -> None:
        """Waits for a running fsync, and syncs the rest. The caller may close the writer before its next await."""
        while self._syncing is not None and not self._syncing.done():
            await asyncio.wait((self._syncing,))
        self._writer.sync()
        self._num_synced = self._num_appended


def _hold(path: Path) -> io.FileIO:
    """Opens a file for appending, creating it if needed, and locks it. Raises RunError if another process has the lock.

    The lock belongs to the file, not the name. If the file was replaced before locking, it is closed and reopened.
    """
    for _ in range(HOLD_TRIES):
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise RunError(f"{path}: another process is writing it; wait for it, or name another file") from None
        except OSError as error:  # no locks on this file system: the user must run one writer at a time
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
    """Ends the file with a newline: cuts off a torn last line. Raises DataError if the last line is not a record."""
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
        raise DataError(f"its last line is not a record ({error}); name another file", path) from error
    os.write(handle, b"\n")


@contextlib.contextmanager
def lock_directory(directory: Path, path: Path) -> Iterator[None]:
    """Locks `directory` for this process through the file `path`. The system releases the lock when the process dies.

    On a file system without locks it logs a warning, and the user must run one process at a time.

    Raises RunError if another process holds the lock or `path` is not a regular file.
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
            file.truncate(0)  # in a container, another process may reuse this process id


def is_locked_here(directory: Path) -> bool:
    """Returns whether this process holds the directory lock."""
    return directory.resolve() in _LOCKED


# --- whole files ------------------------------------------------------------------------------------------------------


def read_object(path: Path, *, within: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises DataError, also for a link that leads out of the run `within`."""
    try:
        data = read_file(path, max_bytes=MAX_OBJECT_BYTES, within=within)
        value = json.loads(data)
        if b"\\u" in data or b"\xed" in data:  # lone surrogates, which have no UTF-8, become U+FFFD
            value = json.loads(json_lines.HALF_PAIRS.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
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
    """Writes a temporary sibling, fsyncs it and renames it to `path`. Readers see the old content or the new."""
    with new_file(path) as file:
        file.write(data)


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Writes a whole JSON-lines file like `write_file`, with one record in memory at a time."""
    with new_file(path) as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in records)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields an empty temporary file in the same directory. On a clean exit it is fsynced and renamed to `path`."""
    make_directory(path.parent)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(beside, "wb", opener=owner_only) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not name the file
        raise
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def new_directory(path: Path, *, is_private: bool = True) -> Iterator[Path]:
    """Yields a temporary directory that is fsynced and renamed to `path` at the end. `is_private`: for its owner."""
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
                file.chmod(0o700 if file.is_dir() else file.stat().st_mode & 0o600)  # read-only files stay read-only
        sync_directory(beside)
        _replace(path, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _replace(path: Path, new: Path) -> None:
    """Renames `new` to `path`. An existing `path` is kept until the rename succeeds and restored if it fails."""
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


def link_or_copy(source: str, target: str) -> None:
    """For files that are never changed. Copies where the file system has no links, or is another one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    """Removes a file, a directory with its content, or a link (not its target). A missing path is fine."""
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
