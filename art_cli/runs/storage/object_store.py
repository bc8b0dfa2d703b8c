"""ObjectStore: the objects below one address, through fsspec; Lease: the machine that works on a run kept there.

    ObjectStore("s3://bucket/prefix/mine").write("checkpoints/step_0004/manifest.json", data)
    lease/000003.json   {"token": "6f1c...", "owner": "gpu-1, process 812", "until": 1790000000.0}

Keys and endpoints come from the environment, as the store's own client reads them. Every call has a deadline; one that
overruns it is left behind in its thread. A store's text of an error becomes one line without secrets. Names that a
run could not have, such as "../x", are left out of every list.

The lease with the highest number holds, until its time is over. Its owner renews it by writing it again. Another
machine takes the run over by making the next number, which the store lets only one of two machines do; the first owner
finds that number and stops. The file .store.json in the run's directory has the token of the lease under which the
directory was last written. So a machine that starts again detects that another one worked on the run since.
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
        self._left_behind: dict[
            Future[Any], str
        ] = {}  # calls that overran their time, and the object that each changes
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

    def download(self, name: str, path: Path, size: int, *, may_grow: bool = False) -> int:
        """Writes the object to `path`, beside its place and then renamed. Returns the bytes that came.

        Raises OSError: the disk cannot take it; StorageError also: other than `size` came, or less where it `may_grow`.
        """
        make_directory(path.parent)
        with new_file(path) as file:
            self._call(_copy_down, self._fs, self._path(name), file, timeout_s=self._transfer_s(size))
            if file.tell() != size and (file.tell() < size or not may_grow):
                raise StorageError(f"{self.address}/{name}: {file.tell()} bytes came, and its list says {size}")
            return file.tell()

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces the object, at once."""
        if self._is_local:
            self._call(_write_locally, Path(self._path(name)), data, changes=name)
        else:
            self._call(self._fs.pipe_file, self._path(name), data, changes=name)

    def upload(self, name: str, path: Path, size: int) -> None:
        """Makes or replaces the object with what the file has. Raises FileNotFoundError: there is no such file."""
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        function = _copy_locally if self._is_local else self._fs.put_file
        self._call(function, str(path), self._path(name), timeout_s=self._transfer_s(size), changes=name)

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
        """Returns the result of a call in another thread, which is left behind when it overruns its time.

        `changes`: the object that it writes or removes. A call that was left behind may still do so, and would undo
        what a later one did; so there is none until it has ended.
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


LEASE_S = 120.0  # how long a lease holds after it was renewed
RENEW_S = LEASE_S / 4
SKEW_S = 15.0  # the clocks of two machines may differ by this much
HOME = "lease"
_NAME = re.compile(r"lease/([0-9]{6,12})\.json", re.ASCII)
MAX_BYTES = 10_000


class LeaseRecord(msgspec.Struct, kw_only=True):
    """The object of one lease."""

    schema_version: int = 1
    token: str
    owner: str
    until: float  # seconds since the epoch; 0: given back
    after: str = ""  # token of the lease before it; of starts that came to nothing, that of the one before them


class Marker(msgspec.Struct, kw_only=True):
    """.store.json of a run's directory: the store that it is kept in, and the lease that it was last written under."""

    schema_version: int = 1
    address: str
    token: str  # "": none yet
    is_whole: bool  # False: the run is being downloaded into the directory
    next_token: str = ""  # the lease that is about to be taken, for a process that dies in that moment


class Lease:
    """The lease of one run, taken by `take`. Several threads may renew and confirm it."""

    def __init__(self, store: ObjectStore, number: int, record: LeaseRecord) -> None:
        self.store, self.number, self.record = store, number, record

    def renew(self) -> None:
        """Extends the lease. Raises RunError: another machine took the run over; StorageError."""
        self.confirm()
        self.record.until = time.time() + LEASE_S
        self._write()

    def confirm(self) -> None:
        """Raises RunError: another machine took the run over; StorageError."""
        newest = _newest(self.store)
        if newest > self.number:
            other = _read(self.store, newest)
            owner = other.owner if other is not None else "another machine"
            raise RunError(f"{self.store.address}: taken over by {owner}, so this machine stops")

    def give_back(self) -> None:
        """Ends the lease, so that another machine need not wait. Raises RunError, StorageError."""
        self.confirm()
        self.record.until = 0.0
        self._write()

    def _write(self) -> None:
        self.store.write(_name(self.number), msgspec.json.encode(self.record))


def take(store: ObjectStore, token: str, *, own: str = "", begun: str = "") -> Lease:
    """The lease of the run at `store`, under a new token. `own` was this directory's, whose process is dead; `begun`
    was that of a start in it that came to nothing.

    Raises RunError: another machine has it; StorageError.
    """
    newest = _newest(store)
    last = _read(store, newest) if newest else None
    if last is not None and last.token not in (own, begun) and time.time() < last.until + SKEW_S:
        raise RunError(_in_use(store, last))
    after = "" if last is None else last.after if last.token == begun else last.token
    record = LeaseRecord(token=token, owner=_owner(), until=time.time() + LEASE_S, after=after)
    if not store.create(_name(newest + 1), msgspec.json.encode(record)):
        other = _read(store, newest + 1)
        if other is None or other.token != token:  # else ours, whose answer was lost
            raise RunError(_in_use(store, other) if other else f"{store.address}: another machine just took it")
    if (kept := _read(store, newest + 1)) is None or kept.token != record.token:
        raise RunError(f"{store.address}: another machine took it in the same moment")  # a store without conditions
    store.delete(_name(number) for number in range(max(1, newest - 2), newest))
    return Lease(store, newest + 1, record)


def holder(store: ObjectStore) -> str:
    """Returns the machine that works on the run, and the latest end of its lease, or "". Raises StorageError."""
    newest = _newest(store)
    last = _read(store, newest) if newest else None
    return _in_use(store, last) if last is not None and time.time() < last.until + SKEW_S else ""


def read_marker(root: Path) -> Marker | None:
    """Returns the marker of a run's directory, or None. Raises DataError if the file is damaged."""
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


def _owner() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _newest(store: ObjectStore) -> int:
    """Returns the highest number of a lease; 0: there is none."""
    found = (_NAME.fullmatch(name) for name in store.objects(HOME))
    return max((int(match[1]) for match in found if match is not None), default=0)


def _read(store: ObjectStore, number: int) -> LeaseRecord | None:
    """Returns the lease, or None if it is not there or cannot be read, and is free then."""
    try:
        return msgspec.json.decode(store.read(_name(number), limit=MAX_BYTES), type=LeaseRecord)
    except (ValueError, RecursionError, MissingObject):
        return None


def _name(number: int) -> str:
    return f"{HOME}/{number:06d}.json"
