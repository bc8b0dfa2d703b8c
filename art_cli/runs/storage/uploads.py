"""Uploads: compares a run directory with the store and uploads missing files in a safe order.

    files needed for resuming -> newest checkpoint (manifest last) -> older checkpoints -> other files

A checkpoint exists once its manifest is uploaded, and is valid if all hashes match. A machine that dies in the middle
of an upload leaves complete checkpoints and some stray files that are never read.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.runs.durable import remove
from art_cli.runs.manifest import MANIFEST, STEP_NAME, Manifest
from art_cli.runs.run_checkpoints import superseded
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import SERVED_FILE
from art_cli.runs.storage.object_store import ObjectStore, Stored, is_safe
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

GROWING_S = 15.0  # minimum seconds between uploads of a growing file
LOGS_S = 120.0  # minimum for logs, which resuming does not need
UPLOAD_SHARE = 0.05  # maximum share of time spent on uploading one growing file
MAX_MANIFEST_BYTES = 16 * 2**20
DATABASE = ".sqlite"  # such a file is copied together with its log, "x.sqlite-wal"
NOT_KEPT = re.compile(r"(.*[./])?lock|.*\.sqlite-(wal|shm|journal)")  # files that lock a directory, and these logs
GATEWAY = "gateway"  # directory of `art gateway`
CHECKPOINTS = "checkpoints"


class _State(NamedTuple):
    """Identifies a file's content for comparison."""

    size: int
    changed: int  # nanoseconds
    inode: int


class _File(NamedTuple):
    name: str
    path: Path
    state: _State


class _Sent(NamedTuple):
    state: _State
    at: float
    seconds: float


class Uploads:
    """Tracks the uploaded parts of a run. Used by a single thread.

    `confirm` is called before uploading files and before completing a checkpoint. It raises if another machine took
    over.
    """

    def __init__(
        self, run: RunDir, store: ObjectStore, *, keep: int, keeps_best: bool, confirm: Callable[[], None]
    ) -> None:
        self.run, self.store, self._confirm = run, store, confirm
        self._keep, self._keeps_best = keep, keeps_best
        self._sent: dict[str, _Sent] = {}
        self._whole: dict[int, str] = {}  # step -> sha256 of the manifest in the store
        self._refused: dict[int, str] = {}  # step -> manifest sha256 of a local checkpoint with missing files
        self._is_untidy = True  # the store may contain unwanted or partial checkpoints
        self.num_bytes = 0  # bytes uploaded so far

    def look(self) -> None:
        """Reads the store's current content. Raises StorageError."""
        there = self.store.objects()
        for name, _, state in self._files():
            # Files in directories grow or never change, so equal size means equal content, except in a night's reports.
            is_rewritten = "/" not in name or (name.startswith("nights/") and name.endswith(".json"))
            is_rewritten |= name.endswith(DATABASE)
            if not is_rewritten and name in there and there[name].size == state.size:
                self._sent[name] = _Sent(state, 0.0, 0.0)
        for step in steps_of(there):
            data = self.store.read(f"{checkpoint_home(step)}/{MANIFEST}", limit=MAX_MANIFEST_BYTES)
            self._whole[step] = hashlib.sha256(data).hexdigest()

    def send(self, *, everything: bool) -> bool:
        """Uploads pending files and one checkpoint. Returns True if more are pending. Raises StorageError, RunError."""
        newest = max(self.run.checkpoint_steps(), default=None)
        if newest is None:  # a run that never started has nothing to keep
            return False
        files, now = self._changed(), time.monotonic()
        if files or self._unsent():  # another machine may have taken over while this machine was asleep
            self._confirm()
        needed = [file for file in files if _is_needed(file.name, newest)]
        # a night's checkpoint is complete with its manifest, and served.json names one
        needed.sort(key=lambda file: (file.name == SERVED_FILE, file.path.name == MANIFEST))
        for file in needed:
            self._send_file(file)
        for name in [name for name in self._sent if _is_of_night(name) and not (self.run.root / name).exists()]:
            del self._sent[name]
            self._is_untidy = True
        # A newer checkpoint must wait until the files of its step are uploaded.
        if owed := [step for step in self._unsent() if step <= newest]:
            self._send_checkpoint(owed[0])
            self._is_untidy = True
        if self._is_untidy:
            self._prune()
            self._is_untidy = False
        for file in files:
            if file not in needed and (everything or self._is_due(file.name, now)):
                self._send_file(file)
        return bool(self._unsent())

    def owed(self) -> list[str]:
        checkpoints = [checkpoint_home(step) for step in self._unsent()]
        files = [file.name for file in self._changed() if not file.name.startswith("logs/")]
        return checkpoints + files if self.run.checkpoint_steps() else []

    # --- files --------------------------------------------------------------------------------------------------------

    def _files(self) -> Iterator[_File]:
        """Yields every mirrored file outside checkpoints."""
        for place, directories, names in os.walk(self.run.root):
            inside = os.path.relpath(place, self.run.root)
            prefix = "" if inside == "." else f"{inside}/"
            directories[:] = sorted(
                name
                for name in directories
                if not name.startswith(".") and (prefix or name not in (CHECKPOINTS, "lease"))
            )
            for name in sorted(names):
                if is_safe(prefix + name) and not NOT_KEPT.fullmatch(prefix + name):
                    with contextlib.suppress(OSError):  # the file was replaced or removed
                        path = Path(place, name)
                        status = path.lstat()
                        if path.is_file() and not path.is_symlink():
                            changed = max(status.st_mtime_ns, _log_changed(path))
                            yield _File(prefix + name, path, _State(status.st_size, changed, status.st_ino))

    def _changed(self) -> list[_File]:
        """Returns files whose current content is not yet uploaded, ordered by step."""
        return [file for file in self._files() if self._sent.get(file.name, (None,))[0] != file.state]

    def _is_due(self, name: str, now: float) -> bool:
        sent = self._sent.get(name)
        if sent is None:
            return True
        interval = LOGS_S if name.startswith("logs/") else GROWING_S
        return now - sent.at >= max(interval, sent.seconds / UPLOAD_SHARE)

    def _send_file(self, file: _File) -> None:
        begin = time.monotonic()
        try:
            with _at_rest(file.path) as path:
                self.store.upload(file.name, path, file.state.size)
        except FileNotFoundError:  # the file was removed meanwhile
            return
        self.num_bytes += file.state.size
        self._sent[file.name] = _Sent(file.state, time.monotonic(), time.monotonic() - begin)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _unsent(self) -> list[int]:
        """Returns the steps of pending checkpoints, newest first. Superseded checkpoints are not uploaded."""
        steps = self.run.checkpoint_steps()
        unwanted = superseded(self.run, {*steps, *self._whole}, keep=self._keep, keeps_best=self._keeps_best)
        wanted = (step for step in steps[::-1] if step not in unwanted)
        known = {step: ("", self._whole.get(step), self._refused.get(step)) for step in steps}
        return [step for step in wanted if self._digest(step) not in known[step]]

    def _digest(self, step: int) -> str:
        """Returns the sha256 of the local checkpoint's manifest; "" after removal."""
        try:
            return hashlib.sha256((self.run.checkpoint_path(step) / MANIFEST).read_bytes()).hexdigest()
        except OSError:
            return ""

    def _send_checkpoint(self, step: int) -> None:
        """Uploads a checkpoint, unless training removed it. A checkpoint with a missing file is refused."""
        home = checkpoint_home(step)
        try:
            with self._held(step) as held:
                data = (held / MANIFEST).read_bytes()
                sizes = {name: (held / name).stat().st_size for name in msgspec.json.decode(data, type=Manifest).files}
                if step in self._whole:  # replacing different content: invalidate the old checkpoint first
                    self.store.delete([f"{home}/{MANIFEST}"])
                    del self._whole[step]
                for name, size in sizes.items():
                    self.store.upload(f"{home}/{name}", held / name, size)
                    self.num_bytes += size
                self._confirm()
                self.store.write(f"{home}/{MANIFEST}", data)
                self._whole[step] = hashlib.sha256(data).hexdigest()
        except FileNotFoundError as error:
            if digest := self._digest(step):
                self._refused[step] = digest
                name = Path(error.filename or MANIFEST).name
                log.warning("%s: not uploaded, because %s is missing", self.run.checkpoint_path(step), name)

    @contextlib.contextmanager
    def _held(self, step: int) -> Iterator[Path]:
        """Yields a directory of hard links to the checkpoint, so that training may remove it meanwhile."""
        there, held = self.run.checkpoint_path(step), self.run.checkpoints / f".step_{step:04d}.upload.tmp"
        try:
            remove(held)
            try:
                shutil.copytree(there, held, copy_function=os.link)
            except (OSError, shutil.Error):  # the checkpoint was removed, or the file system lacks hard links
                yield there
                return
            yield held
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _prune(self) -> None:
        """Removes checkpoints that training would not keep, and partial uploads from dead machines."""
        unwanted = superseded(self.run, self._whole, keep=self._keep, keeps_best=self._keeps_best)
        kept = self._whole.keys() - unwanted
        there = self.store.objects(CHECKPOINTS)
        doomed = [name for name in there if (step := _step_of(name)) is not None and step not in kept]
        there = self.store.objects("nights") if (self.run.root / "nights").is_dir() else {}
        doomed += [name for name in there if _is_of_night(name) and not (self.run.root / name).exists()]
        self.store.delete(sorted(doomed, key=lambda name: not name.endswith(f"/{MANIFEST}")))
        for step in unwanted:
            del self._whole[step]


def _log_changed(path: Path) -> int:
    """Returns when an SQLite database's log was written last, in nanoseconds; 0 without entries."""
    if path.suffix == DATABASE:
        with contextlib.suppress(OSError):
            status = path.with_name(f"{path.name}-wal").stat()
            return status.st_mtime_ns if status.st_size else 0
    return 0


@contextlib.contextmanager
def _at_rest(path: Path) -> Iterator[Path]:
    """Yields a whole copy of an SQLite database, which `art gateway` may be writing. Other files are yielded as is."""
    if path.suffix != DATABASE or not path.exists():
        yield path
        return
    with scratch("upload") as directory:
        copy = directory / path.name
        try:
            with (
                contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                contextlib.closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
        except sqlite3.Error as error:  # such as a file that is not a database
            log.debug("%s: uploaded as it is: %s", path, error)
            copy = path
        yield copy


def steps_of(there: Mapping[str, Stored]) -> list[int]:
    """Returns the steps with a checkpoint manifest in the store, ascending."""
    steps = {_step_of(name) for name in there if name.endswith(f"/{MANIFEST}") and name.count("/") == 2}
    return sorted(step for step in steps if step is not None and f"{checkpoint_home(step)}/{MANIFEST}" in there)


def checkpoint_home(step: int) -> str:
    """Returns a checkpoint's directory name in the store."""
    return f"{CHECKPOINTS}/step_{step:04d}"


def _step_of(name: str) -> int | None:
    """Returns the checkpoint step of an object name; None for other objects."""
    parts = name.split("/")
    match = STEP_NAME.fullmatch(parts[1]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None
    return int(match[1]) if match is not None else None


def _is_of_night(name: str) -> bool:
    """Returns True for a file of a night's checkpoint."""
    return name.startswith("nights/") and f"/{CHECKPOINTS}/" in name


def _is_needed(name: str, newest: int) -> bool:
    """Returns True if resuming from the newest checkpoint may need this file."""
    first = name.partition("/")[0]
    if first == "nights":
        return not ("/run/" in name and name.endswith((".jsonl", ".log")))  # these grow
    match = STEP_NAME.fullmatch(first)
    return int(match[1]) < newest if match is not None else first not in ("logs", GATEWAY)
