"""Sources: the runs and files under a path: a run directory, a directory of runs or JSONL files, or a file."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from art_cli.runs.feedback import FEEDBACK_FILE
from art_cli.runs.json_lines import open_file, read_file
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from art_cli.view.index import STEP_DIRECTORY, Index

MAX_SOURCES = 200  # maximum runs and files of a page
LINES = (".jsonl", ".ndjson")
NO_SOURCES = ("labels.jsonl", FEEDBACK_FILE)  # lines about trajectories in other files
START_BYTES = 65_536  # bytes at the start of a file that are checked for records
LIVE_S = 60.0  # a source changed within this time counts as running


class ViewSource:
    """A run or file. `id` is its number in URLs."""

    def __init__(self, number: int, path: Path, kind: Literal["run", "file"]) -> None:
        self.id, self.path, self.kind = str(number), path, kind
        self.name = (path.resolve().name if kind == "run" else path.name) or str(path)
        self.index = Index(path)
        self.run = RunDir(path) if kind == "run" else None

    @property
    def is_running(self) -> bool:
        """True if the run's owner process is alive or the files changed a moment ago."""
        changed = self.index.modified
        if self.run is not None:
            with contextlib.suppress(OSError):
                changed = max(changed, self.run.metrics_path.stat().st_mtime)
        return time.time() - changed < LIVE_S or (self.run is not None and _has_owner(self.run))


class Sources:
    """All sources of the paths. Directories are searched again, because new runs may appear."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises UsageError for a missing path or a path without anything to show."""
        self._paths = paths
        self._by_path: dict[Path, ViewSource] = {}
        for path in paths:
            if not list(found(path)):
                raise UsageError(_nothing_in(path))
            if path.is_file() and not _may_have_records(path):
                raise UsageError(f"{path}: not JSON lines; name a run, a directory of runs, or a JSONL file")
        self.look()
        if len(self._by_path) >= MAX_SOURCES:
            raise UsageError(f"more than {MAX_SOURCES} runs and files; name some of them")

    def look(self) -> bool:
        """Finds new sources and new bytes. Returns True if there is something to read."""
        for path in self._paths:
            for place, kind in found(path):
                if place not in self._by_path and len(self._by_path) < MAX_SOURCES:
                    self._by_path[place] = ViewSource(len(self._by_path), place, kind)
        return any([source.index.look() for source in self.all()])

    def all(self) -> list[ViewSource]:
        return list(self._by_path.values())

    def get(self, name: str) -> ViewSource | None:
        return next((source for source in self.all() if source.id == name), None)


def found(path: Path) -> Iterator[tuple[Path, Literal["run", "file"]]]:
    """Yields the sources under a path, with their kinds."""
    if path.is_file():
        yield path, "file"
    elif is_run(path):
        yield path, "run"
    elif path.is_dir():
        for entry in sorted(path.iterdir()):
            if is_run(entry):
                yield entry, "run"
            elif entry.suffix in LINES and entry.name not in NO_SOURCES and entry.is_file():
                yield entry, "file"


def is_run(path: Path) -> bool:
    """Returns True for a run directory, including a new run."""
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    has_steps = any(STEP_DIRECTORY.fullmatch(name) for name in names) and "manifest.json" not in names
    return "metrics.jsonl" in names or {"config.json", "logs"} <= names or (has_steps and path.name != "checkpoints")


def _may_have_records(path: Path) -> bool:
    """Returns True if a line near the start looks like a record, or if the file is still empty."""
    with open_file(path) as file:
        start = file.read(START_BYTES)
    lines = [line for line in start.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    return not lines or any(line.lstrip().startswith(b"{") for line in lines)


def _nothing_in(path: Path) -> str:
    """Returns the reason why the path has nothing to show, and a remedy."""
    if not os.path.lexists(path):
        return f"{path}: no such file or directory"
    if not path.is_dir():
        return f"{path}: not a regular file; name a run, a directory of runs, or a JSONL file"
    run = next((parent for parent in path.resolve().parents if is_run(parent)), None)
    hint = f"it is part of the run {run}; name that" if run else "name a run, a directory of runs, or a JSONL file"
    return f"{path}: no run and no JSONL file in it; {hint}"


def _has_owner(run: RunDir) -> bool:
    """Returns True if the process named in the run's lock is alive. Leaves the lock alone for a starting training."""
    try:
        owner = read_file(run.logs / "lock", max_bytes=32, within=run.root).strip()
        if not owner.isdigit() or int(owner) in (1, os.getpid()):  # from another container
            return False
        os.kill(int(owner), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True
