"""Checkpoint manifests (manifest.json) and base model hashes (hashes.json). They prove that directories are complete.

The learner fills the checkpoint directory. This module does not depend on torch.
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
STEP_NAME = re.compile(r"step_([0-9]{4,18})", re.ASCII)  # directory name of a step's checkpoint
NOT_WEIGHTS = ("optimizer", "rng", "README", "base/")  # path prefixes of checkpoint files unrelated to replies
MAX_PROOF_BYTES = 16 * 2**20  # a manifest with a thousand files takes 150 kB
HASHING_THREADS = 4  # each thread hashes 1.7 GB/s, so a 4 GB base model takes 0.6 s


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's parts outside its checkpoint. Origin(base="9f3c...", template="51e0...", dtype="float32")"""

    base: str  # digest of the base model
    template: str = ""  # sha256 of the chat template; "" when the model has no template
    dtype: str = ""  # dtype of the base weights
    quantize: str = ""  # "4bit" if the base weights are quantized to 4 bits


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Probe tokens and the learner's logprobs for them: [L - 1] nats at temperature 1. Example:
    Probe(tokens=[7, 3, 41], logprobs=[-3.6, -5.8], rounded=[-3.6, -5.81], base=[-3.7, -6.1], base_rounded=[-3.7, -6.0])

    Probes from older versions and from servers only have `logprobs`.
    """

    tokens: list[int]  # [L] probe text; identical in all checkpoints of the run
    logprobs: list[float]
    rounded: list[float] = []  # logprobs after moving each embedding by one rounding step
    base: list[float] = []  # logprobs of the base model without the adapter; [] without an adapter
    base_rounded: list[float] = []


class Manifest(msgspec.Struct, kw_only=True):
    """A checkpoint's facts and file hashes. The manifest is the last file to be written.

    Example: Manifest(step=4, base="../../base", config_hash="9f3c...", files={"adapter_model.safetensors": "ab12..."})
    """

    schema_version: int = SCHEMA_VERSION
    step: int
    base: str  # hub id or directory; for a base inside the run, a path relative to the checkpoint
    config_hash: str
    dtype: str = ""  # dtype of the base weights during training; "" in imported and older checkpoints
    origin: Origin | None = None  # None in imported and older checkpoints
    probe: Probe | None = None  # same condition; engines check their own logprobs against it
    metrics: dict[str, float] = {}  # metrics of the checkpoint's step; they complete metrics.jsonl after a kill
    files: dict[str, str] = {}  # path inside the checkpoint -> sha256
    sizes: dict[str, int] = {}  # path inside the checkpoint -> bytes; empty in older checkpoints
    digest: str = ""  # sha256 of this manifest with an empty `digest`; "" in older checkpoints

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is none of {', '.join(filter(None, DTYPES))}")


class Hashes(msgspec.Struct, kw_only=True):
    """hashes.json of a built base, which proves it unchanged. Hashes(files={"config.json": "9f3c...", ...})"""

    schema_version: int = SCHEMA_VERSION
    files: dict[str, str]  # path inside the directory -> sha256
    sizes: dict[str, int] = {}  # path inside the directory -> bytes; empty in older models


@contextlib.contextmanager
def new_checkpoint(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yields a directory to fill, adds `manifest.json` with all file hashes, and renames the directory to `path`."""
    with new_directory(path) as directory:
        yield directory
        manifest.files = hash_files(directory)
        manifest.sizes = _sizes(directory, manifest.files)
        finite = {name: float(value) for name, value in manifest.metrics.items() if math.isfinite(value)}
        manifest.metrics = finite  # JSON cannot hold other numbers
        manifest.digest = manifest_digest(msgspec.json.encode(manifest))
        (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def write_hashes(directory: Path) -> None:
    """Writes `hashes.json` with the hash of every file in the directory."""
    files = hash_files(directory)
    hashes = Hashes(files=files, sizes=_sizes(directory, files))
    (directory / HASHES).write_bytes(msgspec.json.format(msgspec.json.encode(hashes)))


def is_built(directory: Path) -> bool:
    """Returns True for a base model written by a user's function. It may be the only copy."""
    return (directory / HASHES).is_file()


def hash_files(directory: Path) -> dict[str, str]:
    """Returns the sha256 of each file below `directory` by relative path, except manifest.json and hashes.json."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (MANIFEST, HASHES))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip((str(path.relative_to(directory)) for path in files), pool.map(hash_file, files), strict=True))


def odd_files(directory: Path) -> list[str]:
    """Returns the entries below `directory` that no hash covers: links (their targets may change), pipes and
    devices."""
    odd = (path for path in directory.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir()))
    return sorted(str(path.relative_to(directory)) for path in odd)


def hash_file(path: Path) -> str:
    """Returns the file's sha256 in hexadecimal. Raises OSError; a sparse file larger than its disk also raises."""
    with open_file(path) as file:
        disk, size = os.fstatvfs(file.fileno()), os.fstat(file.fileno()).st_size
        if 0 < disk.f_blocks * disk.f_frsize < size:
            raise OSError(errno.EFBIG, f"{size} bytes, which is more than its disk has", str(path))
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sizes(directory: Path, names: Iterable[str]) -> dict[str, int]:
    return {name: (directory / name).stat().st_size for name in names}


def manifest_digest(data: bytes) -> str:
    """Returns the sha256 of a manifest's JSON with an empty `digest`, including unknown fields; "" if invalid."""
    try:
        return hashlib.sha256(msgspec.json.encode(msgspec.json.decode(data) | {"digest": ""})).hexdigest()
    except (ValueError, RecursionError):
        return ""


def policy_digest(origin: Origin, files: Mapping[str, str]) -> str:
    """Returns a policy's name: a sha256 of its origin and of the hashes of files that affect replies."""
    weights = {name: digest for name, digest in sorted(files.items()) if not name.startswith(NOT_WEIGHTS)}
    return hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(origin), weights])).hexdigest()


def digest_of(manifest: Manifest) -> str:
    """Returns the policy digest of a checkpoint; "" for imported and older checkpoints, which have no origin."""
    return "" if manifest.origin is None else policy_digest(manifest.origin, manifest.files)


def verify_checkpoint(directory: Path) -> Manifest:
    """Hashes every file of a checkpoint and returns its manifest. Raises CheckpointError on any problem."""
    manifest = _read_hashes(directory, MANIFEST, Manifest)
    if manifest.digest and manifest.digest != manifest_digest(
        read_file(directory / MANIFEST, max_bytes=MAX_PROOF_BYTES)
    ):
        raise CheckpointError(f"{directory}: {MANIFEST} does not match its own hash")
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{directory}: {MANIFEST} belongs to step {manifest.step}")
    _verify_files(directory, manifest)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of an already verified checkpoint. Raises CheckpointError if it cannot be read."""
    return _read_hashes(directory, MANIFEST, Manifest)


def verify_built(directory: Path) -> None:
    """Raises CheckpointError if a built base differs from its hashes; older versions wrote none."""
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
    """Raises CheckpointError if a file is missing, changed or was added. Compares sizes before hashing.

    An added file is as dangerous as a changed one, because libraries might load it. Hidden files and notes (.md) are
    allowed, because nothing reads them.
    """
    try:
        there = {
            str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()
        }
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
    if proof.sizes and proof.sizes.keys() != proof.files.keys():
        raise CheckpointError(f"{directory}: sizes and hashes are of different files")
    for name, digest in proof.files.items():
        if name not in found:
            raise CheckpointError(f"{directory}: {printable(name)} is missing")
        if found[name] != digest:
            raise CheckpointError(f"{directory}: {name} does not match its hash")
    for name in sorted(there - proof.files.keys()):
        is_proof = Path(name).name in (MANIFEST, HASHES)  # includes the proof of a base model inside the checkpoint
        if not is_proof and not name.startswith(".") and not name.endswith(".md"):
            raise UncertainCheckpoint(f"{directory}: {printable(name)} was put there by hand; remove it")
