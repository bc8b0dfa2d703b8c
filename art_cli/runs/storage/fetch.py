"""Downloads a run, a checkpoint or a directory of runs from an object store.

restore     downloads everything needed for training into the run's own directory
fetch       downloads what a command reads into a cache directory; later calls update the cache

Local files keep the object names, provided a run can use such names. A checkpoint is accepted only if every file
matches its manifest.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from art_cli.runs.chain import LABELS
from art_cli.runs.durable import LineWriter, lock_directory, new_directory, read_object, remove, write_file
from art_cli.runs.manifest import MANIFEST, STEP_NAME, Manifest, verify_checkpoint
from art_cli.runs.run_checkpoints import wanted_steps
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import read_served
from art_cli.runs.storage.object_store import HOME, Marker, ObjectStore, Stored, is_safe, write_marker
from art_cli.runs.storage.uploads import CHECKPOINTS, GATEWAY, MAX_MANIFEST_BYTES, NOT_KEPT, checkpoint_home, steps_of
from art_cli.runtime.errors import CheckpointError, DataError, RunError, StorageError, UsageError, one_line, printable
from art_cli.runtime.scratch import make_directory, scratch, user_cache

log = logging.getLogger(__name__)

Wants = Literal["records", "policy", "everything"]
Objects = Mapping[str, Stored]
INDEX = ".objects.json"  # maps names to marks for the cached objects
SMALL_BYTES = 32 * 2**20  # larger checkpoint files are weights, which viewers do not need
MAX_RUNS = 200  # maximum number of runs fetched from one directory


# --- for training -----------------------------------------------------------------------------------------------------


def restore(run: RunDir, store: ObjectStore, token: str, *, own: Marker | None) -> None:
    """Downloads the run from the store into its directory, if it exists there.

    `own` is the directory's marker if it was mirrored to this store. In this case the directory is outdated and is
    renamed to a sibling. Raises RunError if the directory has a run that was never mirrored here; StorageError.
    """
    there = _of_run(store.objects())
    if not _has_run(there):
        return
    if _is_used(run) and (own is None or not own.token):
        raise RunError(
            f"{run.root}: a run is here that was never kept at {store.address}, and another one is there; "
            "move one of them away, or give this one another name (name=...)"
        )
    if own is not None and own.is_whole and _is_used(run):
        log.warning("%s: another machine continued it; the files from here are now in %s", run.root, _set_aside(run))
    write_marker(run.root, Marker(address=store.address, token=token, is_whole=False))
    log.info("%s: getting it from %s", run.root, store.address)
    for name, stored in there.items():
        if not name.startswith(f"{CHECKPOINTS}/"):
            path = run.root / name
            if name.startswith(f"{GATEWAY}/") and path.exists():  # a running gateway may be writing it
                continue
            if path == run.log_path:  # this process is writing its own log
                path = path.with_name(f"train-{token[:8]}.log")
            store.download(name, path, stored.size)
    _get_promoted(store, run, there)
    for which in ("newest", "best"):
        _get_checkpoint(store, run, there, wanted_steps(run, which, steps_of(there)))


def _is_used(run: RunDir) -> bool:
    return bool(run.checkpoint_steps()) or run.metrics_path.exists() or run.config_path.exists()


def _set_aside(run: RunDir) -> Path:
    """Moves the run to a new sibling directory, except open logs and the gateway's directory, still in use."""
    places = (run.root.with_name(f"{run.root.name}.aside-{number}") for number in range(1, 10_000))
    place = next(place for place in places if not place.exists())
    make_directory(place)
    for path in sorted(run.root.iterdir()):
        if path != run.logs and path.name != GATEWAY and not path.name.startswith("."):
            path.rename(place / path.name)
    return place


def _of_run(there: Objects) -> dict[str, Stored]:
    return {
        name: each for name, each in there.items() if not NOT_KEPT.fullmatch(name) and not name.startswith(f"{HOME}/")
    }


def _has_run(there: Objects) -> bool:
    return "config.json" in there or "metrics.jsonl" in there or bool(steps_of(there))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _get_checkpoint(store: ObjectStore, run: RunDir, there: Objects, steps: Iterable[int]) -> None:
    """Downloads the checkpoint of the first step that verifies."""
    for step in steps:
        try:
            _get_one(store, checkpoint_home(step), run.checkpoint_path(step), there)
            return
        except CheckpointError as error:
            log.warning("passed over a checkpoint: %s", error)


def _get_promoted(store: ObjectStore, run: RunDir, there: Objects) -> None:
    """Downloads the checkpoint that `art improve` promoted, and the base of the night's run that made it."""
    served = read_served(run.root)
    if served is not None and f"{served.checkpoint}/{MANIFEST}" in there:
        made_in = Path(served.checkpoint).parent.parent
        base = {name: each for name, each in there.items() if name.startswith(f"{made_in}/base/")}
        _refresh(store, run.root, base, there)
        _get_one(store, served.checkpoint, run.root / served.checkpoint, there)


def _get_one(store: ObjectStore, home: str, path: Path, there: Objects) -> None:
    """Downloads a checkpoint to `path` unless it is already there. Raises CheckpointError if it does not verify."""
    prefix = f"{home}/" if home else ""
    data = store.read(f"{prefix}{MANIFEST}", limit=MAX_MANIFEST_BYTES)
    if (path / MANIFEST).is_file() and (path / MANIFEST).read_bytes() == data:
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(path)
            return
    try:
        names = list(msgspec.json.decode(data, type=Manifest).files)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{store.address}/{prefix}{MANIFEST}: cannot be read: {one_line(error)}") from error
    for name in names:
        if not is_safe(name) or prefix + name not in there:
            shown = printable(name, limit=100)
            raise CheckpointError(f"{store.address}/{home}: {shown} is missing" if is_safe(name) else
                                  f"{store.address}/{home}: refused the file name {shown!r}")  # fmt: skip
    with new_directory(path) as directory:
        for name in names:
            store.download(prefix + name, directory / name, there[prefix + name].size)
        write_file(directory / MANIFEST, data)
        try:
            manifest = verify_checkpoint(directory)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(directory), f"{store.address}/{home}")) from None
        named = STEP_NAME.fullmatch(path.name)
        if named is not None and int(named[1]) != manifest.step:
            raise CheckpointError(f"{store.address}/{home}: {MANIFEST} belongs to step {manifest.step}")


# --- for viewing and serving ------------------------------------------------------------------------------------------


class NothingThere(UsageError):
    """The store has nothing at this address."""


def fetch(address: str, wants: Wants) -> Path:
    """Downloads a command's input from `address` and returns the local directory.

    "records" excludes weights, "policy" includes base and candidate checkpoints, and "everything" includes all files.
    Raises NothingThere, StorageError, and CheckpointError if the checkpoint does not verify.
    """
    run, inside = _take_apart(address)
    store, path = ObjectStore(run), cache_path(run)
    there = _of_run(store.objects())
    if not inside and MANIFEST in there:
        with _locked(path):
            _get_one(store, "", path, there)
        return path
    if _has_run(there):
        with _locked(path):
            _fetch_run(store, RunDir(path), there, inside, wants)
        return path / inside
    runs = [] if inside else [name for name in store.directories() if name != CHECKPOINTS][:MAX_RUNS]
    found = [name for name in runs if _has_run(_of_run((store / name).objects()))]
    if not found:
        raise NothingThere(f"{address}: no run and no checkpoint there")
    for name in found:
        fetch(f"{run}/{name}", wants)
    return path


def cache_path(address: str) -> Path:
    """Returns the directory for a run (or runs) in the user's cache directory (XDG)."""
    protocol, _, rest = address.partition("://")
    parts = [part if is_safe(part) else f"_{part.encode().hex()}" for part in rest.strip("/").split("/")]
    return user_cache().joinpath("runs", protocol, *parts)


def _locked(path: Path) -> contextlib.AbstractContextManager[None]:
    return lock_directory(path, path.with_name(f".{path.name}.lock"))


def _take_apart(address: str) -> tuple[str, str]:
    """Splits an address into a run's address and "", "base" or a checkpoint directory like "checkpoints/step_0004"."""
    head, _, last = address.rstrip("/").rpartition("/")
    if last == "base":
        return head, last
    if head.endswith(f"/{CHECKPOINTS}") and STEP_NAME.fullmatch(last):
        return head.removesuffix(f"/{CHECKPOINTS}"), f"{CHECKPOINTS}/{last}"
    return address.rstrip("/").removesuffix(f"/{CHECKPOINTS}"), ""


def _fetch_run(store: ObjectStore, run: RunDir, there: Objects, inside: str, wants: Wants) -> None:
    records = {name: each for name, each in there.items() if not name.startswith(f"{CHECKPOINTS}/")}
    if wants == "policy":
        needed = (
            name for name in records if "/" not in name or name.startswith("base/") or name.endswith("/evaluation.json")
        )
        records = {name: records[name] for name in needed}
    elif wants == "records":
        records = {
            name: each for name, each in records.items() if not name.startswith("base/") or _is_small(name, each)
        }
    _refresh(store, run.root, records, there)
    steps = steps_of(there)
    for step in set(run.checkpoint_steps()) - set(steps):
        remove(run.checkpoint_path(step))
    if inside.startswith(CHECKPOINTS):
        _get_one(store, inside, run.root / inside, there)
    elif wants == "policy":
        _get_promoted(store, run, there)
        for which in ("offered", "best", "newest"):
            _get_checkpoint(store, run, there, wanted_steps(run, which, steps))
    elif wants == "everything":
        for step in steps:
            _get_checkpoint(store, run, there, [step])
    else:
        for step in steps:
            _fetch_metadata(store, run, there, step)


def _is_small(name: str, stored: Stored) -> bool:
    return stored.size <= SMALL_BYTES and not name.endswith(".safetensors")


def _refresh(store: ObjectStore, root: Path, wanted: Objects, there: Objects) -> None:
    """Downloads changed objects (growing ones up to their present size), and removes copies of deleted ones."""
    make_directory(root)
    known = _read_index(root)
    for name in known.keys() - there.keys():
        if is_safe(name) and Path(name).name != LABELS:
            (root / name).unlink(missing_ok=True)
    fresh = {name: mark for name, mark in known.items() if name in there}
    try:
        for name, each in wanted.items():
            path = root / name
            if known.get(name) != each.mark or not each.mark or not path.is_file() or path.stat().st_size != each.size:
                fresh.pop(name, None)
                if path.name == LABELS and path.is_file():
                    size = _bring_labels(store, name, path, each.size)
                else:
                    size = store.download(name, path, each.size, may_grow=True)
                if size == each.size:
                    fresh[name] = each.mark
    finally:
        write_file(root / INDEX, json.dumps(fresh).encode())


def _bring_labels(store: ObjectStore, name: str, path: Path, size: int) -> int:
    """Appends the store's labels to a local file that a person may be editing. Returns the downloaded bytes."""
    with scratch("labels") as directory:
        size = store.download(name, directory / path.name, size, may_grow=True)
        found = (directory / path.name).read_bytes().splitlines(keepends=True)
    with LineWriter(path) as writer:
        ours = set(path.read_bytes().splitlines(keepends=True))
        theirs = [line for line in found if line.endswith(b"\n") and line not in ours]
        writer.append_all(msgspec.Raw(line.strip()) for line in theirs)
    return size


def _read_index(root: Path) -> dict[str, str]:
    try:
        found = read_object(root / INDEX)
    except DataError:
        return {}
    return {name: mark for name, mark in found.items() if isinstance(mark, str)}


def _fetch_metadata(store: ObjectStore, run: RunDir, there: Objects, step: int) -> None:
    """Downloads a checkpoint's small files, enough for viewing the run. The local checkpoint does not verify."""
    prefix = f"{checkpoint_home(step)}/"
    for name, each in there.items():
        path = run.root / name
        if (
            name.startswith(prefix)
            and _is_small(name, each)
            and not (path.is_file() and path.stat().st_size == each.size)
        ):
            try:
                store.download(name, path, each.size)
            except StorageError as error:  # training replaced or removed the file
                log.debug("%s", error)
