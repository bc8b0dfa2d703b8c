"""Lease: which machine works on a run that is kept in an object store.

    lease/000003.json   {"token": "6f1c...", "owner": "gpu-1, process 812", "until": 1790000000.0}

The highest number holds, until its time is over. Its owner renews it by writing it again. Another machine takes the run
over by making the next number, which the store lets only one of two machines do; the first owner finds that number and
stops. The file .store.json in the run's directory has the token of the lease under which the directory was last
written. So a machine that starts again knows whether another one worked on the run since.
"""

import os
import re
import socket
import time
from collections.abc import Set
from pathlib import Path

import msgspec

from art_cli.runs.durable import write_file
from art_cli.runs.storage.object_store import MissingObject, ObjectStore
from art_cli.runtime.errors import DataError, RunError, one_line, printable

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


class Marker(msgspec.Struct, kw_only=True):
    """.store.json of a run's directory: the store that it is kept in, and the lease that it was last written under."""

    schema_version: int = 1
    address: str
    token: str  # "": none yet
    is_whole: bool  # False: the run is being downloaded into the directory
    next_token: str = ""  # the lease that is about to be taken, for a process that dies in that moment


class Lease:
    """The lease of one run, taken by `take`. Several threads may renew and confirm it."""

    def __init__(self, store: ObjectStore, number: int, record: LeaseRecord, *, previous: str) -> None:
        self.store, self.number, self.record = store, number, record
        self.previous = previous  # token of the lease before this one; "": there was none

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


def take(store: ObjectStore, token: str, *, own: Set[str] = frozenset()) -> Lease:
    """The lease of the run at `store`, under a new token. Those in `own` were this directory's, whose process is dead.

    Raises RunError: another machine has it; StorageError.
    """
    newest = _newest(store)
    last = _read(store, newest) if newest else None
    if last is not None and last.token not in own and time.time() < last.until + SKEW_S:
        raise RunError(_in_use(store, last))
    record = LeaseRecord(token=token, owner=_owner(), until=time.time() + LEASE_S)
    if not store.create(_name(newest + 1), msgspec.json.encode(record)):
        last = _read(store, newest + 1)
        raise RunError(_in_use(store, last) if last else f"{store.address}: another machine just took it")
    if (kept := _read(store, newest + 1)) is None or kept.token != record.token:
        raise RunError(f"{store.address}: another machine took it in the same moment")  # a store without conditions
    store.delete(_name(number) for number in range(max(1, newest - 2), newest))
    return Lease(store, newest + 1, record, previous=last.token if last is not None else "")


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
