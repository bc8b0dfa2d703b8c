"""Owns every path and file format of a run, for writing and for reading.

    runs/<name>/
      config.json                     resolved, with nulls
      metrics.jsonl                   one line per step and split
      step_0003/trajectories.jsonl    one trajectory per line, appended as it finishes
      step_0003/scored.jsonl
      step_0003/rewards.jsonl         one line per group; only where later steps choose by it
      step_0003/eval.jsonl, evaluation.json     an evaluation of the policy at that step: its trajectories, its numbers
      checkpoints/step_0004/          a PEFT directory, optimizer and RNG, manifest.json last
      logs/

Appends are flushed line by line. Whole files and directories are written beside their place, fsynced and renamed.
Reading tolerates a torn last line and refuses any other damage with `file:line`. There is no state file, because what
a run still owes follows from the files that exist. The learner fills a checkpoint; this module knows nothing of torch.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from art_cli import json_lines
from art_cli.errors import CheckpointError, DataError, RunError, one_line, printable
from art_cli.private import make_directory, owner_only
from art_cli.processes.plain_json import is_deep
from art_cli.trajectory import SCHEMA_VERSION, GroupRewards, ScoredTrajectory, Trajectory

log = logging.getLogger(__name__)
Record = TypeVar("Record")

HOLD_TRIES = 20  # number of times that a file is opened again because it was replaced while it was being locked
TAIL_BYTES = 2**16  # bytes read at a time, from the end, in search of the last line
MANIFEST, HASHES = "manifest.json", "hashes.json"
DTYPES = ("", "float32", "bfloat16")
STEP_NAME = re.compile(r"step_([0-9]{4,18})", re.ASCII)
MAX_OBJECT_BYTES, MAX_OBJECT_DEPTH = 16 * 2**20, 64  # a configuration has a few kilobytes and five levels
HASHING_THREADS = 4  # sha256 takes 1.7 GB/s in each thread, so a base model of 4 GB takes 0.6 s


class Manifest(msgspec.Struct, kw_only=True):
    """What a checkpoint is, and the proof that it is whole. It is written last.

    Example: Manifest(step=4, base="../../base", config_hash="9f3c...", files={"adapter_model.safetensors": "ab12..."})
    """

    schema_version: int = SCHEMA_VERSION
    step: int
    base: str  # hub id, or a directory; a base inside the run is relative to the checkpoint
    config_hash: str
    dtype: str = ""  # dtype of the base weights that it was trained on; "" in imported and older checkpoints
    metrics: dict[str, float] = {}  # metrics of the step that made it; after a kill they complete metrics.jsonl
    files: dict[str, str] = {}  # path inside the checkpoint -> sha256
    digest: str = ""  # sha256 of this manifest without its digest; "" in checkpoints of versions that had none

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is none of {', '.join(filter(None, DTYPES))}")


class Hashes(msgspec.Struct, kw_only=True):
    """hashes.json in a base model that was built: the proof that the directory is unchanged.

    Example: Hashes(files={"config.json": "9f3c...", "model.safetensors": "ab12..."})
    """

    schema_version: int = SCHEMA_VERSION
    files: dict[str, str]  # path inside the directory -> sha256


class MetricsLine(msgspec.Struct, kw_only=True):
    """One line of metrics.jsonl: the numbers of one step and split ("train", "sft", "eval")."""

    schema_version: int = SCHEMA_VERSION
    step: int
    split: str
    metrics: dict[str, float]
    time: float  # seconds since the epoch


class Evaluation(msgspec.Struct, kw_only=True):
    """evaluation.json: what one evaluation found, scenario by scenario, so that policies can be compared in pairs.

    Example: Evaluation(seconds=4.2, values={"reward": {"game-1": 1.0, "game-2": 0.0}})
    """

    schema_version: int = SCHEMA_VERSION
    seconds: float  # how long playing and judging took
    values: dict[str, dict[str, float]]  # metric -> scenario id -> mean over its attempts


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_lines(path: Path, kind: type[Record]) -> Iterator[Record]:
    """The records of a JSON-lines file, one at a time; none if there is no such file.

    A last line without a newline is torn, because its writer was killed, and is left out. Raises DataError with the
    line: it is not a `kind`, or its `schema_version` is newer than this program's.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    for number, _, line in json_lines.lines(path):
        if json_lines.is_torn(line):
            log.warning("%s:%d: the last line is torn; left out", path, number)
            return
        try:
            record = json_lines.decode(line, decoder)
        except ValueError as error:
            raise DataError(_explain(error, line), path, number) from error
        version = getattr(record, "schema_version", SCHEMA_VERSION)
        if version > SCHEMA_VERSION:
            raise DataError(newer_schema(version), path, number)
        yield record


class _Version(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def _explain(error: Exception, line: bytes) -> str:
    """Why a line cannot be read: the error, or that a newer program wrote it."""
    with contextlib.suppress(ValueError):
        version = json_lines.decode(line, msgspec.json.Decoder(_Version)).schema_version
        if version > SCHEMA_VERSION:
            return newer_schema(version)
    return str(error)


def newer_schema(version: int) -> str:
    """The message that refuses a record of schema `version`."""
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
        """Whether `path` still names the file that is written; false after it was removed or replaced."""
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


@contextlib.contextmanager
def lock_directory(directory: Path, path: Path) -> Iterator[None]:
    """Locks `directory` for this process by the file `path`. The system releases the lock when the process dies.

    Raises RunError: another process holds the lock.
    """
    make_directory(path.parent)
    with open(path, "a+", errors="replace", opener=owner_only) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(32).strip()
            raise RunError(
                f"{directory}: in use by process {owner if owner.isdecimal() else '?'}; wait for it or stop it"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


# --- whole files ------------------------------------------------------------------------------------------------------


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError: no such file, too large, not JSON, too deep, or no object."""
    try:
        if not path.is_file():  # opening a pipe would block until it has a writer
            raise DataError("not a file" if os.path.lexists(path) else "no such file", path)
        if path.stat().st_size > MAX_OBJECT_BYTES:
            raise DataError(f"{path.stat().st_size} bytes; at most {MAX_OBJECT_BYTES} are read", path)
        value = json.loads(path.read_bytes())
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
    make_directory(path.parent)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(beside, "wb", opener=owner_only) as file:
            file.writelines(pieces)
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
                file.chmod(0o700 if file.is_dir() else 0o600)
        sync_directory(beside)
        remove(path)
        beside.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


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


# --- checkpoints ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_checkpoint(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a directory to fill, adds `manifest.json` with every file's hash, and moves it to `path` at once."""
    with new_directory(path) as directory:
        yield directory
        manifest.files = hash_files(directory)
        finite = {name: float(value) for name, value in manifest.metrics.items() if math.isfinite(value)}
        manifest.metrics = finite  # JSON has no other numbers
        manifest.digest = manifest_digest(msgspec.json.encode(manifest))
        (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def write_hashes(directory: Path) -> None:
    """Adds `hashes.json` with the hash of every file in the directory."""
    hashes = Hashes(files=hash_files(directory))
    (directory / HASHES).write_bytes(msgspec.json.format(msgspec.json.encode(hashes)))


def hash_files(directory: Path) -> dict[str, str]:
    """sha256 of every file below `directory` but manifest.json and hashes.json, by its path there."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (MANIFEST, HASHES))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip((str(path.relative_to(directory)) for path in files), pool.map(_hash, files), strict=True))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(data: bytes) -> str:
    """sha256 of a manifest's JSON with an empty `digest`; fields that only another version knows are hashed as well.

    "" for what is not JSON that could be written again.
    """
    try:
        return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(data) | {"digest": ""})).hexdigest()
    except (ValueError, RecursionError):
        return ""


def verify_checkpoint(directory: Path) -> Manifest:
    """The manifest of a checkpoint, after every file was hashed. Raises CheckpointError: the first thing wrong."""
    manifest = _read_hashes(directory, MANIFEST, Manifest)
    if manifest.digest and manifest.digest != manifest_digest((directory / MANIFEST).read_bytes()):
        raise CheckpointError(f"{directory}: {MANIFEST} does not match its own hash")
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{directory}: {MANIFEST} is that of step {manifest.step}")
    _verify_files(directory, manifest.files)
    return manifest


def verify_built(directory: Path) -> None:
    """Compares a built base model with its hashes. One without hashes passes, because older versions wrote none.

    Raises CheckpointError: the first thing wrong.
    """
    if os.path.lexists(directory / HASHES):
        _verify_files(directory, _read_hashes(directory, HASHES, Hashes).files)


Proof = TypeVar("Proof", Manifest, Hashes)


def _read_hashes(directory: Path, name: str, kind: type[Proof]) -> Proof:
    try:
        if os.path.lexists(directory / name) and not (directory / name).is_file():
            raise CheckpointError(f"{directory}: {name} is not a file")
        proof = msgspec.json.decode((directory / name).read_bytes(), type=kind)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no {name}") from None
    except OSError as error:
        raise CheckpointError(f"{directory}: {name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{directory}: {name} cannot be read: {one_line(error)}") from error
    if proof.schema_version > SCHEMA_VERSION:
        raise CheckpointError(f"{directory}: {name}: {newer_schema(proof.schema_version)}")
    return proof


def _verify_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Raises CheckpointError: a file is missing, changed, or was added.

    An added file is as dangerous as a changed one, because a library could load it. Hidden files and notes (.md) are
    allowed, because nothing reads them.
    """
    try:
        found = hash_files(directory)
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: cannot be read: {error.strerror or error}") from error
    if not expected:
        raise CheckpointError(f"{directory}: no file is listed")
    for name, digest in expected.items():
        if name not in found:
            raise CheckpointError(f"{directory}: {printable(name)} is missing")
        if found[name] != digest:
            raise CheckpointError(f"{directory}: {name} does not match its hash")
    for name in found:
        if name not in expected and not name.startswith(".") and not name.endswith(".md"):
            raise CheckpointError(f"{directory}: {printable(name)} was put there by hand; remove it")


# --- the run ----------------------------------------------------------------------------------------------------------


class RunDir:
    """The directory of one run. Making the object touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config_path = root / "config.json"
        self.metrics_path = root / "metrics.jsonl"
        self.curve_path = root / "curve.svg"  # drawn from metrics.jsonl, for people
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.log_path = self.logs / "train.log"  # log of all starts of `art train`
        self.base = root / "base"  # a base model built by code, when the config names a builder

    def trajectories_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "trajectories.jsonl"

    def scored_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "scored.jsonl"

    def group_rewards_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "rewards.jsonl"

    def eval_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "eval.jsonl"

    def evaluation_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "evaluation.json"

    def first_eval_path(self) -> Path | None:
        """The evaluation of the earliest step; a judge compares later attempts with its. None: there is none."""
        return min(self.root.glob("step_*/eval.jsonl"), key=lambda path: int(path.parent.name[5:]), default=None)

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:04d}"

    def trajectories(self, step: int) -> list[Trajectory]:
        return list(read_lines(self.trajectories_path(step), Trajectory))

    def scored(self, step: int) -> list[ScoredTrajectory]:
        return list(read_lines(self.scored_path(step), ScoredTrajectory))

    def group_rewards(self, step: int) -> list[GroupRewards]:
        return list(read_lines(self.group_rewards_path(step), GroupRewards))

    def write_group_rewards(self, step: int, groups: Iterable[GroupRewards]) -> None:
        write_lines(self.group_rewards_path(step), groups)

    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint directory, valid or not, ascending; other names are ignored."""
        named = [(STEP_NAME.fullmatch(path.name), path) for path in self.checkpoints.glob("step_*")]
        steps = {int(match[1]): path for match, path in named if match is not None and path.is_dir()}
        return sorted(step for step, path in steps.items() if path == self.checkpoint_path(step))

    def newest_checkpoint(self, steps: Iterable[int] | None = None) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that verifies, or the first that does of `steps`; None: no such checkpoint.

        A warning says why each checkpoint before it was passed over.
        """
        for step in reversed(self.checkpoint_steps()) if steps is None else steps:
            try:
                return self.checkpoint_path(step), verify_checkpoint(self.checkpoint_path(step))
            except CheckpointError as error:
                log.warning("passed over a checkpoint: %s", error)
        return None

    def metrics(self) -> list[MetricsLine]:
        """The last line of each (step, split), in the order of their first lines."""
        newest = {(line.step, line.split): line for line in read_lines(self.metrics_path, MetricsLine)}
        return list(newest.values())

    def evaluations(self) -> dict[int, dict[str, float]]:
        """The means of each evaluated step."""
        return {line.step: line.metrics for line in self.metrics() if line.split == "eval"}

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        write_file(self.evaluation_path(step), msgspec.json.encode(evaluation) + b"\n")

    def evaluation(self, step: int) -> Evaluation | None:
        """What the evaluation of a step found; None: no such file. Raises DataError: it cannot be read."""
        path = self.evaluation_path(step)
        if not os.path.lexists(path):
            return None
        try:
            found = msgspec.convert(read_object(path), Evaluation)
        except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
            raise DataError(f"not an evaluation: {one_line(error)}", path) from error
        if found.schema_version > SCHEMA_VERSION:
            raise DataError(newer_schema(found.schema_version), path)
        return found

    def append_metrics(self, step: int, split: str, metrics: dict[str, float]) -> None:
        with LineWriter(self.metrics_path) as writer:
            writer.append(MetricsLine(step=step, split=split, metrics=metrics, time=time.time()))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process. The system releases the lock when the process dies, however it dies.

        Raises RunError: another process holds the lock.
        """
        with lock_directory(self.root, self.logs / "lock"):
            yield

    def clean(self) -> None:
        """Removes unfinished files and directories of a killed writer."""
        for path in [*self.root.glob(".*.tmp"), *self.root.glob("*/.*.tmp")]:
            remove(path)
