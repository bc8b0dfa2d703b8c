"""Store: saved checkpoints by tinker:// path. Downloads: temporary secret addresses for their files.

    ROOT/<training run>/run.json                        owner, base model, adapter
    ROOT/<training run>/weights/<name>/                 checkpoint with optimizer: tinker://<run>/weights/<name>
    ROOT/<training run>/sampler_weights/<name>/         checkpoint without optimizer
    ROOT/<training run>/external_weights/<name>/        checkpoint without optimizer; clients may download its files
    ROOT/<training run>/notes/<kind>/<name>.json        mutable facts: expiry time, public or private

Each checkpoint is a plain PEFT directory with a manifest. `art serve` and `art export` accept these directories. A
restarted server finds all checkpoints again. Only the client that requested a download knows its address.
"""

import contextlib
import os
import re
import secrets
import shutil
import tarfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.runs.durable import remove, write_file
from art_cli.runs.manifest import STEP_NAME, Manifest, new_checkpoint, verify_checkpoint
from art_cli.runtime.scratch import make_directory

OFFER_S = 900.0  # lifetime of a download address
MAX_OFFERS = 10_000
BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 2**20
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
RUN_ID = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
MAX_METADATA = 64  # entries in a client's metadata
MAX_METADATA_BYTES = 16_384
UNFINISHED_S = 3600.0  # a temporary file unchanged this long has no writer; several servers may share a root


class Downloads:
    def __init__(self) -> None:
        self._offers: OrderedDict[str, tuple[Path, float]] = OrderedDict()

    @staticmethod
    def token() -> str:
        return secrets.token_hex(16)

    def offer(self, root: str, path: Path) -> tuple[str, float]:
        """Returns a download address for a file or directory, and its expiry time. `root` is the server's address."""
        token, expires = self.token(), time.time() + OFFER_S
        self._offers[token] = path, expires
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return f"{root.rstrip('/')}/api/v1/downloads/{token}", expires

    def take(self, token: str) -> Path:
        """Raises ChatError 404 for unknown or expired addresses."""
        path, expires = self._offers.get(token, (None, 0.0))
        if path is None or expires < time.time() or not path.exists():
            raise ChatError(404, "this address does not work, or no longer; ask for another")
        return path


def tar_length(directory: Path) -> int:
    size = sum(BLOCK + _padded(path.stat().st_size, BLOCK) for path in _files(directory))
    return _padded(size + 2 * BLOCK, tarfile.RECORDSIZE)


def tar_pieces(directory: Path) -> Iterator[bytes]:
    """Yields the tar file in pieces. All files are opened first, so none can be replaced during the transfer."""
    with contextlib.ExitStack() as held:
        files = [(path, held.enter_context(path.open("rb"))) for path in _files(directory)]
        sent = 0
        for path, file in files:
            head = tarfile.TarInfo(str(path.relative_to(directory)))
            head.size = os.fstat(file.fileno()).st_size
            yield head.tobuf(tarfile.GNU_FORMAT)  # always one block
            while piece := file.read(PIECE_BYTES):
                yield piece
            yield bytes(_padded(head.size, BLOCK) - head.size)
            sent += BLOCK + _padded(head.size, BLOCK)
        yield bytes(_padded(sent + 2 * BLOCK, tarfile.RECORDSIZE) - sent)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class RunNotes(msgspec.Struct, kw_only=True):
    """run.json: a training run, meaning a client's adapter."""

    id: str
    owner: str
    base_model: str
    rank: int
    created: float
    user_metadata: dict[str, Any] | None = None


class Notes(msgspec.Struct, kw_only=True):
    """Facts about a checkpoint that are not in its files."""

    created: float
    expires: float | None = None
    is_public: bool = False
    user_metadata: dict[str, str] | None = None
    num_bytes: int = 0


class Place(NamedTuple):
    """A parsed checkpoint path. Example: Place("4f...:train:0", "weights", "step-7")"""

    run: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def parse(uri: str) -> Place:
    """Parses a checkpoint's tinker:// path. Raises ChatError 400 for other text."""
    parts = uri.removeprefix("tinker://").split("/")
    if not uri.startswith("tinker://") or len(parts) != 3:
        raise invalid(f"{uri[:200]!r}: expected tinker://<training run>/weights/<name>")
    return place(*parts)


def place(run: str, kind: str, name: str) -> Place:
    """Raises ChatError 400 if a part is invalid."""
    if not RUN_ID.fullmatch(run):
        raise invalid(f"{run[:200]!r} is not a training run")
    if kind not in KINDS:
        raise invalid(f"{kind[:200]!r} is none of {', '.join(KINDS)}")
    if not NAME.fullmatch(name):
        raise invalid(f"{name[:200]!r}: a checkpoint's name is letters, digits and . _ -, at most 128 of them")
    return Place(run, kind, name)


class Store:
    """The checkpoints below `root`. `quota` limits each client's bytes."""

    def __init__(self, root: Path, *, base: str, dtype: str, quota: int | None) -> None:
        self.root, self._base, self._dtype, self._quota = root, base, dtype, quota
        make_directory(root)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def add_run(self, notes: RunNotes) -> None:
        write_file(self.root / notes.id / "run.json", msgspec.json.encode(notes))

    def run(self, id: str, owner: str | None = None) -> RunNotes:
        """Returns the client's training run, or any client's for None. Raises ChatError 404 for unknown runs."""
        found = self._read_run(id) if RUN_ID.fullmatch(id) else None
        if found is None or owner not in (None, found.owner):
            raise ChatError(404, f"no training run {id[:200]!r}")
        return found

    def runs(self, owner: str) -> list[RunNotes]:
        """Returns the client's training runs, newest first."""
        found = [self._read_run(path.name) for path in self.root.iterdir() if RUN_ID.fullmatch(path.name)]
        mine = [run for run in found if run is not None and run.owner == owner]
        return sorted(mine, key=lambda run: run.created, reverse=True)

    def _read_run(self, id: str) -> RunNotes | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.root / id / "run.json").read_bytes(), type=RunNotes)
        return None

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def path(self, at: Place) -> Path:
        return self.root / at.run / at.kind / at.name

    def readable(self, at: Place, owner: str) -> Path:
        """Returns the checkpoint directory. Raises ChatError 404 if the client may not read it."""
        notes, run = self.notes(at), self._read_run(at.run)
        if notes is None or run is None or (run.owner != owner and not notes.is_public):
            raise ChatError(404, f"no checkpoint {at.uri}")
        return self.path(at)

    def find(self, at: Place, owner: str) -> Path:
        """Returns `readable` after reading all files, so call it in a thread. Raises CheckpointError for damage."""
        path = self.readable(at, owner)
        verify_checkpoint(path)
        return path

    def notes(self, at: Place) -> Notes | None:
        """Returns a checkpoint's notes. Missing and expired checkpoints give None."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            notes = msgspec.json.decode(self._notes_path(at).read_bytes(), type=Notes)
            if self.path(at).is_dir() and (notes.expires is None or notes.expires > time.time()):
                return notes
        return None

    def owned(self, at: Place, owner: str) -> Notes:
        """Returns the notes on the client's checkpoint. Raises ChatError 404 for unknown checkpoints."""
        run, notes = self._read_run(at.run), self.notes(at)
        if run is None or notes is None or run.owner != owner:
            raise ChatError(404, f"no checkpoint {at.uri}")
        return notes

    def save(self, at: Place, owner: str, step: int, notes: Notes, fill: Callable[[Path], None], *, over: bool) -> None:
        """Writes the checkpoint atomically. Raises ChatError 400 if the name is taken or the quota is exceeded."""
        if self.notes(at) is not None and not over:
            raise invalid(f"{at.uri} is there already; choose another name, or overwrite it")
        if self._quota is not None and self.used(owner) >= self._quota:
            raise invalid(f"the checkpoints of this client take {self._quota / 2**30:g} GiB; delete some")
        named = STEP_NAME.fullmatch(at.name)
        step = int(named[1]) if named else step  # directories named step_N must hold step N
        manifest = Manifest(step=step, base=self._base, config_hash="", dtype=self._dtype)
        with new_checkpoint(self.path(at), manifest) as directory:
            fill(directory)
            notes.num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            # written before the directory is renamed: a checkpoint without notes would never be deleted
            self.note(at, notes)

    def note(self, at: Place, notes: Notes) -> None:
        write_file(self._notes_path(at), msgspec.json.encode(notes))

    def delete(self, at: Place) -> None:
        """Removes the checkpoint. After a kill, `sweep` removes the remains."""
        doomed = self.path(at).with_name(f".{at.name}.{uuid.uuid4().hex[:8]}.tmp")
        with contextlib.suppress(FileNotFoundError):
            self.path(at).rename(doomed)
        self._notes_path(at).unlink(missing_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)

    def checkpoints(self, run: str) -> list[tuple[Place, Notes]]:
        """Returns a training run's checkpoints, oldest first."""
        found = [(at, notes) for at in self._places(run) if (notes := self.notes(at)) is not None]
        return sorted(found, key=lambda entry: entry[1].created)

    def used(self, owner: str) -> int:
        return sum(notes.num_bytes for run in self.runs(owner) for _, notes in self.checkpoints(run.id))

    def sweep(self) -> None:
        """Deletes expired checkpoints and partial files from killed servers."""
        for pattern in ("*/.*.tmp", "*/*/.*.tmp", "*/notes/*/.*.tmp"):
            for path in list(self.root.glob(pattern)):
                if time.time() - _last_written(path) > UNFINISHED_S:
                    remove(path)
        for path in list(self.root.iterdir()):
            for at in self._places(path.name) if RUN_ID.fullmatch(path.name) else ():
                is_recent = time.time() - _last_written(self._notes_path(at)) < UNFINISHED_S
                is_being_saved = is_recent and not self.path(at).is_dir()
                if not is_being_saved and self.notes(at) is None:
                    self.delete(at)

    def _places(self, run: str) -> Iterator[Place]:
        for kind in KINDS:
            for path in sorted((self.root / run / "notes" / kind).glob("*.json")):
                if NAME.fullmatch(path.stem):
                    yield Place(run, kind, path.stem)

    def _notes_path(self, at: Place) -> Path:
        return self.root / at.run / "notes" / at.kind / f"{at.name}.json"


def _last_written(path: Path) -> float:
    """Returns the latest modification time in a tree; a file deleted meanwhile counts as just modified."""
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        return time.time()


def make_notes(ttl_s: int | None, user_metadata: dict[str, str] | None) -> Notes:
    """Raises ChatError 400 if metadata is too large."""
    now = time.time()
    expires = None if ttl_s is None else now + ttl_s
    return Notes(created=now, expires=expires, user_metadata=check_metadata(user_metadata))


def check_metadata(found: dict[str, Any] | None) -> Any:
    """Returns the client's metadata. Raises ChatError 400 if it is too large."""
    encode_notes(user_metadata=found)
    if len(found or ()) > MAX_METADATA:
        raise invalid(f"user_metadata: {len(found or ())} entries; at most {MAX_METADATA}")
    return found


def encode_notes(**notes: Any) -> bytes:
    """Returns client-provided text as JSON. Raises ChatError 400 above the size limit."""
    encoded = msgspec.json.encode(notes)
    if len(encoded) > MAX_METADATA_BYTES:
        raise invalid(f"{' and '.join(notes)}: {len(encoded)} bytes; at most {MAX_METADATA_BYTES}")
    return encoded
