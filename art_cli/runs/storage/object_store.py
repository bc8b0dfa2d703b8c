"""ObjectStore: the objects below one address, by their names there, through fsspec.

    ObjectStore("s3://bucket/prefix/mine").write("checkpoints/step_0004/manifest.json", data)

Keys and endpoints come from the environment, as the store's own client reads them. Every call has a deadline; one that
overruns it is left behind in its thread. A store's text of an error becomes one line without secrets. Names that a
run could not have, such as "../x", are left out of every list.
"""

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from art_cli.config.store_address import missing_client, problem_of, protocol_of, shown
from art_cli.runs.durable import new_file
from art_cli.runtime.errors import ArtError, StorageError, UsageError, one_line, printable
from art_cli.runtime.permissions import make_directory
from art_cli.runtime.secrets import find_secrets
from art_cli.runtime.threads import start_in_thread

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CALL_S = 60.0  # longest time of a call that moves little
MIN_RATE = 2**18  # bytes per second; a transfer may take as long as it takes at this rate
MAX_LEFT_BEHIND = 8  # number of overrun calls that may still run; with more the store counts as down
MAX_NAME, MAX_PARTS = 500, 8
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+@=,-]*", re.ASCII)
S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}}


class Stored(NamedTuple):
    """The facts of one object in a list. Example: Stored(1024, '"9dd4e461268c"')"""

    size: int
    mark: str  # changes with the content: an ETag, a hash or the time of the last change


def is_safe(name: str) -> bool:
    """Returns True if a run could have a file of this name, so that it may be written below a directory."""
    parts = name.split("/")
    return len(name) <= MAX_NAME and len(parts) <= MAX_PARTS and all(map(_PART.fullmatch, parts))


class ObjectStore:
    """The objects below `address`. Making it reaches no network. Any thread may call.

    All methods raise StorageError: the store cannot be reached, refuses, or does not answer in time.
    """

    def __init__(self, address: str) -> None:
        """Raises UsageError: no such kind of store, or its client is not installed."""
        if problem := problem_of(address) or missing_client(address):
            raise UsageError(f"{shown(address)}: {problem}")
        self.address = address.rstrip("/")
        self._secrets = find_secrets(os.environ)
        self._left_behind: set[Future[Any]] = set()
        self._fs, self._root = self._call(_open, self.address)

    def __truediv__(self, name: str) -> "ObjectStore":
        return ObjectStore(f"{self.address}/{name}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def objects(self, below: str = "") -> dict[str, Stored]:
        """Every object by its name, or those below a directory; names that no run has are left out, with a warning."""
        place = f"{self._root}/{below}".rstrip("/")
        found = self._call(self._fs.find, place, detail=True)
        names = {str(path)[len(self._root) + 1 :]: info for path, info in found.items()}
        kept = {name: _stored(info) for name, info in names.items() if is_safe(name)}
        strange = [name for name in names if name not in kept and not name.endswith("/") and not _is_hidden(name)]
        if strange:
            log.warning("%s: left out %d objects whose names no run has, such as %r", self.address, len(strange),
                        printable(strange[0], limit=100))  # fmt: skip
        return kept

    def directories(self) -> list[str]:
        """Returns the first parts of the names below the address, such as the names of runs."""
        try:
            found = self._call(self._fs.ls, self._root, detail=False)
        except MissingObject:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted(name for name in names if is_safe(name))

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns the object's bytes. Raises MissingObject; StorageError also: it has more than `limit` bytes."""
        data: bytes = self._call(self._fs.cat_file, self._path(name), start=0, end=limit + 1)
        if len(data) > limit:
            raise StorageError(f"{self.address}/{name}: more than {limit} bytes")
        return data

    def download(self, name: str, path: Path, size: int) -> None:
        """Writes the object to `path`, beside its place and then renamed. Raises OSError: the disk cannot take it."""
        make_directory(path.parent)
        with new_file(path) as file:
            self._call(_copy_down, self._fs, self._path(name), file, timeout_s=self._transfer_s(size))
            if file.tell() != size:
                raise StorageError(f"{self.address}/{name}: {file.tell()} bytes came, and its list says {size}")

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces the object, at once."""
        if self._is_local:
            self._call(_write_locally, Path(self._path(name)), data)
        else:
            self._call(self._fs.pipe_file, self._path(name), data)

    def upload(self, name: str, path: Path, size: int) -> None:
        """Makes or replaces the object with what the file has. Raises FileNotFoundError: there is no such file."""
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        function = _copy_locally if self._is_local else self._fs.put_file
        self._call(function, str(path), self._path(name), timeout_s=self._transfer_s(size))

    def create(self, name: str, data: bytes) -> bool:
        """Whether the object was made; False: there is one already, also if another machine made it at this moment."""
        try:
            if self._is_local:
                self._call(_create_locally, Path(self._path(name)), data)
            else:
                self._call(self._fs.pipe_file, self._path(name), data, mode="create")
        except ObjectExists:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, one after the other in this order; one that is not there is no error."""
        for name in names:
            try:
                self._call(self._fs.rm_file, self._path(name))
            except MissingObject:
                continue

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def _is_local(self) -> bool:
        return protocol_of(self.address) in ("file", "local")

    def _path(self, name: str) -> str:
        assert is_safe(name), name
        return f"{self._root}/{name}"

    def _transfer_s(self, size: int) -> float:
        return CALL_S + size / MIN_RATE

    def _call(
        self, function: Callable[..., Result], *arguments: Any, timeout_s: float | None = None, **knobs: Any
    ) -> Result:
        """Returns the result of a call in another thread, which is left behind when it overruns its time."""
        timeout_s = timeout_s or CALL_S
        self._left_behind = {each for each in self._left_behind if not each.done()}
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            raise StorageError(f"{self.address}: does not answer ({len(self._left_behind)} calls still wait)")
        future = start_in_thread(partial(function, *arguments, **knobs))
        try:
            return future.result(timeout_s)
        except Exception as error:
            if not future.done():
                self._left_behind.add(future)
                raise StorageError(f"{self.address}: no answer within {timeout_s:.0f} s") from None
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return StorageError(f"{self.address}: no space left on its disk") if error.filename is None else error
        if isinstance(error, ArtError):
            return error
        text = f"{self.address}: {self._secrets.redact(one_line(error, limit=300))}"
        match error:
            case FileNotFoundError():
                return MissingObject(text)
            case FileExistsError():
                return ObjectExists(text)
        return StorageError(text)


class MissingObject(StorageError):
    """There is no such object, or no such bucket."""


class ObjectExists(StorageError):
    """There is such an object already."""


def _open(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options = S3_OPTIONS if protocol_of(address) in ("s3", "s3a") else {}
    fs, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, str(root).rstrip("/")


def _stored(info: dict[str, Any]) -> Stored:
    marks = (info.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created"))
    return Stored(int(info.get("size") or 0), next((str(mark) for mark in marks if mark), ""))


def _is_hidden(name: str) -> bool:
    """Returns True if it is a file that another program's upload left, such as .DS_Store or a half-written file."""
    return name.rpartition("/")[2].startswith(".") and ".." not in name.split("/")


def _copy_down(fs: Any, source: str, file: Any) -> None:
    with fs.open(source, "rb", block_size=2**23, cache_type="readahead") as remote:
        while data := remote.read(2**23):
            try:
                file.write(data)
            except OSError as error:  # the error names the file, so that it is not taken for the store's disk
                raise OSError(error.errno, error.strerror, file.name) from error


def _write_locally(path: Path, data: bytes) -> None:
    with new_file(path) as file:
        file.write(data)


def _create_locally(path: Path, data: bytes) -> None:
    """Raises FileExistsError. No other process sees the file before it is whole."""
    make_directory(path.parent)
    beside = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        beside.write_bytes(data)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _copy_locally(source: str, target: str) -> None:
    with open(source, "rb") as file, new_file(Path(target)) as copy:
        shutil.copyfileobj(file, copy, 2**23)
