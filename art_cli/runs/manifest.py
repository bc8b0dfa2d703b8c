"""Manifest: a checkpoint on disk and the proof that it is whole: manifest.json; hashes.json of a built base model.

The learner fills a checkpoint; this module knows nothing of torch.
"""

import contextlib
import errno
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from art_cli.runs.durable import new_directory, newer_schema
from art_cli.runs.json_lines import open_file, read_file
from art_cli.runs.trajectory import SCHEMA_VERSION
from art_cli.runtime.errors import CheckpointError, UncertainCheckpoint, one_line, printable

MANIFEST, HASHES = "manifest.json", "hashes.json"
DTYPES = ("", "float32", "bfloat16")
STEP_NAME = re.compile(r"step_([0-9]{4,18})", re.ASCII)  # the directory of a step's checkpoint
NOT_WEIGHTS = ("optimizer", "rng", "README", "base/")  # beginnings of a checkpoint's files without part in a reply
MAX_PROOF_BYTES = 16 * 2**20  # a manifest of a thousand files has 150 kB
HASHING_THREADS = 4  # sha256 takes 1.7 GB/s in each thread, so a base model of 4 GB takes 0.6 s


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a policy besides the files of its checkpoint.

    Example: Origin(base="9f3c...", template="51e0...", dtype="float32")
    """

    base: str  # digest of the base model
    template: str = ""  # sha256 of the chat template; "" without one
    dtype: str = ""  # dtype of the base weights
    quantize: str = ""  # "4bit" if the base is kept in 4 bits


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A probe of L tokens, and its scores by the learner of a checkpoint: [L - 1] nats, at temperature 1. Example:
    Probe(tokens=[7, 3, 41], logprobs=[-3.6, -5.8], rounded=[-3.6, -5.81], base=[-3.7, -6.1], base_rounded=[-3.7, -6.0])

    Probes of older versions, and of servers, have logprobs alone.
    """

    tokens: list[int]  # text of the model's own, the same for all checkpoints of a run
    logprobs: list[float]
    rounded: list[float] = []  # the same with each embedding moved by one rounding
    base: list[float] = []  # `logprobs` without the adapter; [] if there is none
    base_rounded: list[float] = []


class Manifest(msgspec.Struct, kw_only=True):
    """The facts of a checkpoint, and the proof that it is whole. It is written last.

    Example: Manifest(step=4, base="../../base", config_hash="9f3c...", files={"adapter_model.safetensors": "ab12..."})
    """

    schema_version: int = SCHEMA_VERSION
    step: int
    base: str  # hub id, or a directory; a base inside the run is relative to the checkpoint
    config_hash: str
    dtype: str = ""  # dtype of the base weights that it was trained on; "" in imported and older checkpoints
    origin: Origin | None = None  # or None in imported and older checkpoints
    probe: Probe | None = None  # as `origin`; an engine that samples from the checkpoint scores it alike
    metrics: dict[str, float] = {}  # metrics of the step that made it; after a kill they complete metrics.jsonl
    files: dict[str, str] = {}  # path inside the checkpoint -> sha256
    sizes: dict[str, int] = {}  # path inside the checkpoint -> bytes; empty in checkpoints of versions that had none
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
    sizes: dict[str, int] = {}  # path inside the directory -> bytes; empty in those of versions that had none


@contextlib.contextmanager
def new_checkpoint(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a directory to fill, adds `manifest.json` with every file's hash, and moves it to `path` at once."""
    with new_directory(path) as directory:
        yield directory
        manifest.files = hash_files(directory)
        manifest.sizes = _sizes(directory, manifest.files)
        finite = {name: float(value) for name, value in manifest.metrics.items() if math.isfinite(value)}
        manifest.metrics = finite  # JSON has no other numbers
        manifest.digest = manifest_digest(msgspec.json.encode(manifest))
        (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def write_hashes(directory: Path) -> None:
    """Adds `hashes.json` with the hash of every file in the directory."""
    files = hash_files(directory)
    hashes = Hashes(files=files, sizes=_sizes(directory, files))
    (directory / HASHES).write_bytes(msgspec.json.format(msgspec.json.encode(hashes)))


def is_built(directory: Path) -> bool:
    """Returns True if it is a base model that a function wrote, which may not be anywhere else."""
    return (directory / HASHES).is_file()


def hash_files(directory: Path) -> dict[str, str]:
    """sha256 of every file below `directory` but manifest.json and hashes.json, by its path there."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (MANIFEST, HASHES))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip((str(path.relative_to(directory)) for path in files), pool.map(hash_file, files), strict=True))


def odd_files(directory: Path) -> list[str]:
    """Returns what no hash covers below `directory`: links, which lead to other bytes tomorrow, pipes and devices."""
    odd = (path for path in directory.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir()))
    return sorted(str(path.relative_to(directory)) for path in odd)


def hash_file(path: Path) -> str:
    """sha256 of the file in hexadecimal digits. Raises OSError, also if it is larger than its file system: holes."""
    with open_file(path) as file:
        disk, size = os.fstatvfs(file.fileno()), os.fstat(file.fileno()).st_size
        if 0 < disk.f_blocks * disk.f_frsize < size:
            raise OSError(errno.EFBIG, f"{size} bytes, which is more than its disk has", str(path))
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sizes(directory: Path, names: Iterable[str]) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in names}


def manifest_digest(data: bytes) -> str:
    """sha256 of a manifest's JSON with an empty `digest`; fields that only another version knows are hashed as well.

    "" for what is not JSON that could be written again.
    """
    try:
        return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(data) | {"digest": ""})).hexdigest()
    except (ValueError, RecursionError):
        return ""


def policy_digest(origin: Origin, files: Mapping[str, str]) -> str:
    """sha256 that names a policy: its origin, and the hashes of those files of its checkpoint that make its replies.

    `files` are a manifest's, or empty for a base model alone.
    """
    weights = {name: digest for name, digest in sorted(files.items()) if not name.startswith(NOT_WEIGHTS)}
    return hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(origin), weights])).hexdigest()


def digest_of(manifest: Manifest) -> str:
    """Returns the digest of a checkpoint's policy; "" for an imported or older one, which has no origin."""
    return "" if manifest.origin is None else policy_digest(manifest.origin, manifest.files)


def verify_checkpoint(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint, after every file was hashed.

    Raises CheckpointError: the first thing wrong.
    """
    manifest = _read_hashes(directory, MANIFEST, Manifest)
    if manifest.digest and manifest.digest != manifest_digest(
        read_file(directory / MANIFEST, max_bytes=MAX_PROOF_BYTES)
    ):
        raise CheckpointError(f"{directory}: {MANIFEST} does not match its own hash")
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{directory}: {MANIFEST} is that of step {manifest.step}")
    _verify_files(directory, manifest)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint that was verified before. Raises CheckpointError: it cannot be read."""
    return _read_hashes(directory, MANIFEST, Manifest)


def verify_built(directory: Path) -> None:
    """Compares a built base model with its hashes. One without hashes passes, because older versions wrote none.

    Raises CheckpointError: the first thing wrong.
    """
    if os.path.lexists(directory / HASHES):
        _verify_files(directory, _read_hashes(directory, HASHES, Hashes))


Proof = TypeVar("Proof", Manifest, Hashes)


def _read_hashes(directory: Path, name: str, kind: type[Proof]) -> Proof:
    try:
        proof = msgspec.json.decode(read_file(directory / name, max_bytes=MAX_PROOF_BYTES), type=kind)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no {name}") from None
    except OSError as error:
        raise UncertainCheckpoint(f"{directory}: {name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{directory}: {name} cannot be read: {one_line(error)}") from error
    if proof.schema_version > SCHEMA_VERSION:
        raise UncertainCheckpoint(f"{directory}: {name}: {newer_schema(proof.schema_version)}")
    return proof


def _verify_files(directory: Path, proof: Manifest | Hashes) -> None:
    """Raises CheckpointError: a file is missing, changed, or was added. Sizes are compared before anything is hashed.

    An added file is as dangerous as a changed one, because a library could load it. Hidden files and notes (.md) are
    allowed, because nothing reads them.
    """
    try:
        there = {str(path.relative_to(directory)) for path in directory.rglob("*") if not _is_plain_directory(path)}
        for name in proof.files.keys() & there:
            size = (directory / name).stat().st_size
            if proof.sizes.get(name, size) != size:
                raise CheckpointError(f"{directory}: {name} has {size} bytes instead of {proof.sizes[name]}")
        found = hash_files(directory)
    except OSError as error:
        raise UncertainCheckpoint(
            f"{error.filename or directory}: cannot be read: {error.strerror or error}"
        ) from error
    if not proof.files:
        raise CheckpointError(f"{directory}: no file is listed")
    for name, digest in proof.files.items():
        if name not in found:
            raise CheckpointError(f"{directory}: {printable(name)} is missing")
        if found[name] != digest:
            raise CheckpointError(f"{directory}: {name} does not match its hash")
    for name in sorted(there - proof.files.keys()):
        is_proof = Path(name).name in (MANIFEST, HASHES)  # also that of a base which lies in the checkpoint
        if not is_proof and not name.startswith(".") and not name.endswith(".md"):
            raise UncertainCheckpoint(f"{directory}: {printable(name)} was put there by hand; remove it")


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
