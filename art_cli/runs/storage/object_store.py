"""ObjectStore: objects below an address, through fsspec. Lease: the machine that currently uses a stored run.

    ObjectStore("s3://bucket/prefix/mine").write("checkpoints/step_0004/manifest.json", data)
    lease/000003.json   {"token": "6f1c...", "owner": "gpu-1, process 812", "until": 1790000000.0}

The store's client reads keys and endpoints from the environment. Every call has a deadline; after the deadline, the
call is abandoned in its thread. Error messages from the store are reduced to a single line without secrets. Listings
skip names that a run cannot use, such as "../x".

The lease with the highest number is valid until it expires. Its owner renews it by rewriting the object. Another
machine takes over by creating the next number, and the store lets only one machine succeed. The previous owner sees the
new number and stops. The file .store.json in the run directory contains the token of the last lease that wrote the
directory. From this a restarted machine detects a takeover in the meantime.
"""

import errno
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from art_cli.config.store_address import missing_client, problem_of, protocol_of, shown
from art_cli.runs.durable import new_file, write_file
from art_cli.runtime.errors import ArtError, DataError, RunError, StorageError, UsageError, one_line, printable
from art_cli.runtime.scratch import make_directory
from art_cli.runtime.secrets import find_secrets
from art_cli.runtime.threads import start_in_thread

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CALL_S = 60.0  # timeout for small calls
MIN_RATE = 2**18  # bytes per second; minimum transfer rate before a timeout
MAX_LEFT_BEHIND = 8  # maximum number of abandoned calls; above this the store counts as down
MAX_NAME, MAX_PARTS = 500, 8
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._+@=,-]*", re.ASCII)
S3_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 3}}}
LEASE_S = 120.0  # validity of a lease after renewal
RENEW_S = LEASE_S / 4
SKEW_S = 15.0  # tolerated clock difference between two machines
HOME = "lease"
_NAME = re.compile(r"lease/([0-9]{6,12})\.json", re.ASCII)
MAX_BYTES = 10_000


class Stored(NamedTuple):
    """An object's listed properties. Example: Stored(1024, '"9dd4e461268c"')"""

    size: int
    mark: str  # changes with the content: an ETag, hash or modification time


def is_safe(name: str) -> bool:
    """Returns True if a run may use this file name. Only such names are written below a directory."""
    parts = name.split("/")
    return len(name) <= MAX_NAME and len(parts) <= MAX_PARTS and all(map(_PART.fullmatch, parts))


class ObjectStore:
    """The objects below `address`. Construction does not use the network. Thread-safe.

    All methods raise StorageError if the store is unreachable, refuses, or does not answer in time.
    """

    def __init__(self, address: str) -> None:
        """Raises UsageError for unknown stores or missing client libraries."""
        if problem := problem_of(address) or missing_client(address):
            raise UsageError(f"{shown(address)}: {problem}")
        self.address = address.rstrip("/")
        self._secrets = find_secrets(os.environ)
        # abandoned calls and the names of the objects they change
        self._left_behind: dict[Future[Any], str] = {}
        self._fs, self._root = self._call(_open, self.address)

    def __truediv__(self, name: str) -> "ObjectStore":
        return ObjectStore(f"{self.address}/{name}")

    # --- reading ------------------------------------------------------------------------------------------------------

    def objects(self, below: str = "") -> dict[str, Stored]:
        """Lists all objects by name, or only objects below a directory. Unsafe names are skipped with a warning."""
        place = f"{self._root}/{below}".rstrip("/")
        found = self._call(self._fs.find, place, detail=True)
        names = {str(path)[len(self._root) + 1 :]: info for path, info in found.items()}
        kept = {name: _stored(info) for name, info in names.items() if is_safe(name)}
        strange = [name for name in names if name not in kept and not name.endswith("/") and not _is_hidden(name)]
        if strange:
            log.warning("%s: skipped %d objects with names that no run has, such as %r", self.address, len(strange),
                        printable(strange[0], limit=100))  # fmt: skip
        return kept

    def directories(self) -> list[str]:
        """Returns the first name parts below the address, for example run names."""
        try:
            found = self._call(self._fs.ls, self._root, detail=False)
        except MissingObject:
            return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
        return sorted(name for name in names if is_safe(name))

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns an object's bytes. Raises MissingObject, and StorageError above `limit` bytes."""
        data: bytes = self._call(self._fs.cat_file, self._path(name), start=0, end=limit + 1)
        if len(data) > limit:
            raise StorageError(f"{self.address}/{name}: more than {limit} bytes")
        return data

    def download(self, name: str, path: Path, size: int, *, may_grow: bool = False) -> int:
        """Downloads the object to `path` through a temporary file. Returns the number of bytes.

        Raises OSError if the disk is full, and StorageError if the size differs from `size` (`may_grow` allows larger
        sizes).
        """
        make_directory(path.parent)
        with new_file(path) as file:
            self._call(_copy_down, self._fs, self._path(name), file, timeout_s=self._transfer_s(size))
            if file.tell() != size and (file.tell() < size or not may_grow):
                raise StorageError(f"{self.address}/{name}: {file.tell()} bytes came, and its list has {size}")
            return file.tell()

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces the object atomically."""
        if self._is_local:
            self._call(write_file, Path(self._path(name)), data, changes=name)
        else:
            self._call(self._fs.pipe_file, self._path(name), data, changes=name)

    def upload(self, name: str, path: Path, size: int) -> None:
        """Creates or replaces the object with the file's content. Raises FileNotFoundError if the file is missing."""
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        function = _copy_locally if self._is_local else self._fs.put_file
        self._call(function, str(path), self._path(name), timeout_s=self._transfer_s(size), changes=name)

    def create(self, name: str, data: bytes) -> bool:
        """Creates the object and returns True, or False if it exists, also if another machine made it just now."""
        try:
            if self._is_local:
                self._call(_create_locally, Path(self._path(name)), data)
            else:
                self._call(self._fs.pipe_file, self._path(name), data, mode="create")
        except ObjectExists:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects sequentially in this order. Missing objects are fine."""
        for name in names:
            try:
                self._call(self._fs.rm_file, self._path(name), changes=name)
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
        self,
        function: Callable[..., Result],
        *arguments: Any,
        timeout_s: float | None = None,
        changes: str = "",
        **knobs: Any,
    ) -> Result:
        """Runs a call in a thread and returns the result. Calls that time out are abandoned.

        `changes` names the object that the call writes or removes. An abandoned call may still finish and undo a later
        call on the same object, so later calls are refused until the abandoned call ends.
        """
        timeout_s = timeout_s or CALL_S
        self._left_behind = {each: name for each, name in self._left_behind.items() if not each.done()}
        if changes and changes in self._left_behind.values():
            raise StorageError(f"{self.address}: an earlier call for {changes} has not ended")
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            raise StorageError(f"{self.address}: does not answer ({len(self._left_behind)} calls still wait)")
        future = start_in_thread(partial(function, *arguments, **knobs))
        try:
            return future.result(timeout_s)
        except Exception as error:
            if not future.done():
                self._left_behind[future] = changes
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
    """The object or bucket does not exist."""


class ObjectExists(StorageError):
    """The object already exists."""


def _open(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options = S3_OPTIONS if protocol_of(address) in ("s3", "s3a") else {}
    fs, root = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, str(root).rstrip("/")


def _stored(info: dict[str, Any]) -> Stored:
    marks = (info.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created"))
    return Stored(int(info.get("size") or 0), next((str(mark) for mark in marks if mark), ""))


def _is_hidden(name: str) -> bool:
    """Returns True for files left by another program's upload, such as .DS_Store or a partial file."""
    return name.rpartition("/")[2].startswith(".") and ".." not in name.split("/")


def _copy_down(fs: Any, source: str, file: Any) -> None:
    with fs.open(source, "rb", block_size=2**23, cache_type="readahead") as remote:
        while data := remote.read(2**23):
            try:
                file.write(data)
            except OSError as error:  # with a file name, the error is not mistaken for a full disk at the store
                raise OSError(error.errno, error.strerror, file.name) from error


def _create_locally(path: Path, data: bytes) -> None:
    """Raises FileExistsError. The file becomes visible only when complete."""
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


class LeaseRecord(msgspec.Struct, kw_only=True):
    schema_version: int = 1
    token: str
    owner: str
    until: float  # seconds since the epoch; 0 after release
    after: str = ""  # token of the previous lease, ignoring failed starts


class Marker(msgspec.Struct, kw_only=True):
    """A run directory's .store.json: the store, and the lease at the latest write."""

    schema_version: int = 1
    address: str
    token: str  # "" until a lease is taken
    is_whole: bool  # False while the run is being downloaded
    next_token: str = ""  # token of a lease being taken, recorded in case this process dies before having the lease


class Lease:
    """A run's lease, acquired by `take`. Several threads may renew and confirm it."""

    def __init__(self, store: ObjectStore, number: int, record: LeaseRecord) -> None:
        self.store, self.number, self.record = store, number, record

    def renew(self) -> None:
        """Extends the lease. Raises StorageError, and RunError if another machine took over the run."""
        self.confirm()
        self.record.until = time.time() + LEASE_S
        self._write()

    def confirm(self) -> None:
        """Raises StorageError, and RunError if another machine took over the run."""
        newest = _newest(self.store)
        if newest > self.number:
            other = _read(self.store, newest)
            owner = other.owner if other is not None else "another machine"
            raise RunError(f"{self.store.address}: taken over by {owner}, so this machine stops")

    def give_back(self) -> None:
        """Ends the lease immediately for other machines. Raises RunError, StorageError."""
        self.confirm()
        self.record.until = 0.0
        self._write()

    def _write(self) -> None:
        self.store.write(_name(self.number), msgspec.json.encode(self.record))


def take(store: ObjectStore, token: str, *, own: str = "", begun: str = "") -> Lease:
    """Acquires the lease of the run at `store` under a new token. `own` is the token of this directory's previous
    (dead) process. `begun` is the token of a failed start in this directory.

    Raises StorageError, and RunError if another machine has the lease.
    """
    newest = _newest(store)
    last = _read(store, newest) if newest else None
    if last is not None and last.token not in (own, begun) and time.time() < last.until + SKEW_S:
        raise RunError(_in_use(store, last))
    after = "" if last is None else last.after if last.token == begun else last.token
    owner = f"{socket.gethostname()}, process {os.getpid()}"
    record = LeaseRecord(token=token, owner=owner, until=time.time() + LEASE_S, after=after)
    if not store.create(_name(newest + 1), msgspec.json.encode(record)):
        other = _read(store, newest + 1)
        if other is None or other.token != token:  # otherwise the store lost our answer
            raise RunError(_in_use(store, other) if other else f"{store.address}: another machine just took it")
    if (kept := _read(store, newest + 1)) is None or kept.token != record.token:
        # the store lacks conditional writes
        raise RunError(f"{store.address}: another machine took it in the same moment")
    store.delete(_name(number) for number in range(max(1, newest - 2), newest))
    return Lease(store, newest + 1, record)


def holder(store: ObjectStore) -> str:
    """Describes the machine using the run and its lease's latest end; "" if the run is free. Raises StorageError."""
    newest = _newest(store)
    last = _read(store, newest) if newest else None
    return _in_use(store, last) if last is not None and time.time() < last.until + SKEW_S else ""


def read_marker(root: Path) -> Marker | None:
    """Returns a run directory's marker. Raises DataError if the file is damaged."""
    path = root / ".store.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Marker)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot be read ({one_line(error)}); move the run's directory away", path) from None


def write_marker(root: Path, marker: Marker) -> None:
    write_file(root / ".store.json", msgspec.json.encode(marker))


def _in_use(store: ObjectStore, record: LeaseRecord) -> str:
    left = max(0.0, record.until + SKEW_S - time.time())
    return (
        f"{store.address}: in use by {printable(record.owner, limit=200)}; stop it there, or if that machine is gone "
        f"wait {left:.0f} s and run the same command again"
    )


def _newest(store: ObjectStore) -> int:
    """Returns the highest lease number; 0 without leases."""
    found = (_NAME.fullmatch(name) for name in store.objects(HOME))
    return max((int(match[1]) for match in found if match is not None), default=0)


def _read(store: ObjectStore, number: int) -> LeaseRecord | None:
    """Returns the lease. Missing or unreadable leases count as free."""
    try:
        return msgspec.json.decode(store.read(_name(number), limit=MAX_BYTES), type=LeaseRecord)
    except (ValueError, RecursionError, MissingObject):
        return None


def _name(number: int) -> str:
    return f"{HOME}/{number:06d}.json"
