"""A source's index: for each step and split, the trajectories in its files, by group.

The index is built in slices of a few milliseconds, so answers are possible meanwhile. When a file grows, only new bytes
are read. An incomplete last line is read once it is complete. Replaced or truncated files are read again.

    step_0003/trajectories.jsonl, scored.jsonl -> IndexedStep(3, "train")       a scored line replaces the unscored one
    step_0003/eval.jsonl                       -> IndexedStep(3, "eval")
    any.jsonl                                  -> IndexedStep(0, "train")
"""

import contextlib
import os
import re
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from art_cli.runs.json_lines import MAX_LINE_BYTES, foreign_format, is_inside, open_file
from art_cli.runtime.errors import printable
from art_cli.view.rows import MAX_SHOWN, IndexRow, Labels, read_rows

SLICE_S = 0.02  # longest time for which a slice holds its step's lock
MAX_COUNTED = 2**26  # files up to this size are counted within a slice; larger files are read, and may be sparse
MAX_PROBLEMS = 20  # number of reported unreadable lines per step
STEP_DIRECTORY = re.compile(r"step_(\d{1,9})")
Split = str  # "train" or "eval"
MAX_NAMED = 100  # number of listed sources per step


class IndexedGroup(NamedTuple):
    """A group's rows, by position."""

    id: str
    label: str
    rows: list[IndexRow]

    @property
    def rewards(self) -> list[float]:
        return [row.reward for row in self.rows if row.reward is not None]

    @property
    def mean(self) -> float | None:
        rewards = self.rewards
        return statistics.fmean(rewards) if rewards else None


class StepNumbers(NamedTuple):
    """A step's numbers in the list of steps."""

    num_groups: int
    num_trajectories: int
    mean_reward: float | None
    sources: list[str]  # names from rollout.sources, sorted


@dataclass
class _File:
    """A file of a step, with reading progress."""

    path: Path
    identity: tuple[int, int] = (0, 0)  # device and inode
    size: int = 0
    modified: float = 0.0
    num_bytes: int = 0  # read so far
    num_lines: int = 0


@dataclass
class IndexedStep:
    """The trajectories of a step and split. All methods are thread-safe."""

    step: int
    split: Split
    paths: list[Path]
    root: Path | None = None  # run directory, which links must not leave
    revision: int = 0  # increases with each change
    problems: list[str] = field(default_factory=list)
    has_scores: bool = False  # True if a judge gave any reward
    searches: dict[str, tuple[int, set[str]]] = field(default_factory=dict)  # text -> (revision, ids with the text)
    _files: dict[Path, _File] = field(default_factory=dict)
    _rows: dict[str, IndexRow] = field(default_factory=dict)
    _groups: dict[str, dict[str, IndexRow]] = field(default_factory=dict)  # group -> id -> row
    _labels: Labels = field(default_factory=Labels)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: tuple[int, StepNumbers] | None = None  # (revision, numbers)
    _listed: tuple[int, list[IndexedGroup]] | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def advance(self, slice_s: float = SLICE_S) -> bool:
        """Reads for about `slice_s` seconds. Returns True if everything was read."""
        until = time.monotonic() + slice_s
        with self._lock:
            return all(self._advance(place, file, until) for place, file in enumerate(self._files.values()))

    def look(self) -> bool:
        """Checks the files for changes. Returns True if there is something to read."""
        with self._lock:
            found = {path: stat for path in self.paths if (stat := _stat(path, self.root)) is not None}
            if any(self._is_replaced(path, stat) for path, stat in found.items()) or self._files.keys() - found.keys():
                self.revision += 1
                for held in (self._files, self._rows, self._groups, self.problems):
                    held.clear()
                self._labels, self.has_scores = Labels(), False
            for path in self.paths:
                problem = f"{path.name}: skipped, because it is not a regular file, or a link that leads out of the run"
                if path not in found and os.path.lexists(path) and problem not in self.problems:
                    self._add_problem(problem)
            for path, stat in found.items():
                file = self._files.setdefault(path, _File(path))
                file.identity, file.size = (stat.st_dev, stat.st_ino), stat.st_size
                file.modified = stat.st_mtime
            return any(file.num_bytes < file.size for file in self._files.values())

    def _is_replaced(self, path: Path, stat: os.stat_result) -> bool:
        known = self._files.get(path)
        return known is not None and (known.identity != (stat.st_dev, stat.st_ino) or stat.st_size < known.num_bytes)

    def _advance(self, place: int, file: _File, until: float) -> bool:
        if file.num_bytes >= file.size:
            return True
        try:
            if file.num_bytes == 0 and self._is_superseded(file):
                file.num_bytes = file.size
                return True
            with self.open(file.path) as handle:
                return self._read(place, file, handle, until)
        except OSError as error:
            self._add_problem(f"{file.path}: {error.strerror}")
            file.num_bytes = file.size
            return True

    def _is_superseded(self, file: _File) -> bool:
        """Returns True if the later scored.jsonl has at least the same number of lines."""
        scored = self._files.get(file.path.with_name("scored.jsonl"))
        if file.path.name != "trajectories.jsonl" or scored is None or scored.modified < file.modified:
            return False
        is_small = max(file.size, scored.size) <= MAX_COUNTED
        return is_small and self._num_lines(scored.path) >= self._num_lines(file.path)

    def _num_lines(self, path: Path) -> int:
        with self.open(path) as handle:
            return sum(data.count(b"\n") for data in iter(lambda: handle.read(2**20), b""))

    def _read(self, place: int, file: _File, handle: IO[bytes], until: float) -> bool:
        handle.seek(file.num_bytes)
        while file.num_bytes < file.size:
            line = handle.readline(MAX_LINE_BYTES)
            if not line:
                file.size = file.num_bytes
                break
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) == MAX_LINE_BYTES:  # the rest of the file may be sparse, of any size
                self._add_line(place, file, line)
                file.num_bytes = file.size
                break
            if is_whole:
                self._add_line(place, file, line)
            elif not self._try_line(place, file, line):
                file.size = file.num_bytes  # torn: the file will grow when the rest is written
                break
            file.num_bytes += len(line)
            file.num_lines += is_whole
            if time.monotonic() > until:
                return file.num_bytes >= file.size
        return True

    def _add_line(self, place: int, file: _File, line: bytes) -> None:
        try:
            self._read_line(place, file, line)
        except ValueError as error:
            self._add_problem(f"{file.path.name}:{file.num_lines + 1}: {error}")

    def _try_line(self, place: int, file: _File, line: bytes) -> bool:
        """Adds a last line without a newline, unless it is incomplete."""
        with contextlib.suppress(ValueError):
            self._read_line(place, file, line)
            return True
        return False

    def _read_line(self, place: int, file: _File, line: bytes) -> None:
        """Raises ValueError if the line has no trajectory."""
        if file.num_lines == 0 and (words := foreign_format(line)):
            raise ValueError(words)
        if not line.strip():
            return
        if len(line) > MAX_SHOWN:
            raise ValueError(f"the line is longer than {MAX_SHOWN >> 20} MiB")
        for row in read_rows(line, file.num_lines + 1, self._labels):
            row.file, row.offset, row.length = place, file.num_bytes, len(line)
            self._add(row)

    def _add(self, row: IndexRow) -> None:
        """Adds the row to its group, replacing an earlier row for the same attempt."""
        self.revision += 1
        self.has_scores = self.has_scores or row.is_scored
        known = self._rows.get(row.id)
        if known is not None and row.kind == "own" and (known.group, known.index) == (row.group, row.index):
            if self._rank(row) >= self._rank(known):
                self._groups[row.group][row.id] = self._rows[row.id] = row
            return
        while row.id in self._rows:
            row.id = f"{row.id}~{len(self._rows)}"
        group = self._groups.setdefault(row.group, {})
        if row.kind == "plain":
            row.index = len(group)
        group[row.id] = self._rows[row.id] = row

    def _rank(self, row: IndexRow) -> int:
        """Returns the index of the row's file in `paths`: scored.jsonl comes after trajectories.jsonl."""
        return self.paths.index(self.path_of(row))

    def _add_problem(self, problem: str) -> None:
        self.revision += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(printable(problem, limit=300))

    def open(self, path: Path) -> IO[bytes]:
        """Opens a file of the step. Raises OSError for a missing file, a special file, or a link out of the run."""
        return open_file(path, within=self.root)

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> tuple[int, int]:
        """(bytes read, total bytes)."""
        files = list(self._files.values())
        return sum(file.num_bytes for file in files), sum(file.size for file in files)

    @property
    def modified(self) -> float:
        return max((file.modified for file in list(self._files.values())), default=0.0)

    def path_of(self, row: IndexRow) -> Path:
        return list(self._files)[row.file]

    def find(self, trajectory: str) -> IndexRow | None:
        return self._rows.get(trajectory)

    def group(self, name: str) -> IndexedGroup | None:
        with self._lock:
            rows = self._groups.get(name)
            return None if rows is None else self._group(name, rows.values())

    def groups(self) -> list[IndexedGroup]:
        """Returns all groups. The list is shared and must not be modified."""
        with self._lock:
            if self._listed is None or self._listed[0] != self.revision:
                listed = [self._group(name, rows.values()) for name, rows in self._groups.items()]
                self._listed = self.revision, listed
            return self._listed[1]

    def names(self) -> list[str]:
        with self._lock:
            return list(self._groups)

    def rows(self) -> list[IndexRow]:
        with self._lock:
            return list(self._rows.values())

    def _group(self, name: str, rows: Iterable[IndexRow]) -> IndexedGroup:
        return IndexedGroup(name, self._labels.of.get(name, ""), sorted(rows, key=lambda row: row.index))

    def numbers(self) -> StepNumbers:
        with self._lock:
            if self._numbers is None or self._numbers[0] != self.revision:
                rewards = [row.reward for row in self._rows.values() if row.reward is not None]
                if rewards and self.split == "eval":  # failed attempts count as 0 in evaluations
                    rewards += [0.0 for row in self._rows.values() if row.reward is None and row.error is not None]
                mean = statistics.fmean(rewards) if rewards else None
                names = sorted({row.source for row in self._rows.values()} - {""})[:MAX_NAMED]
                self._numbers = self.revision, StepNumbers(len(self._groups), len(self._rows), mean, names)
            return self._numbers[1]


class Index:
    """The steps of a source: a run directory or a file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._steps: dict[tuple[int, Split], IndexedStep] = {}
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Finds new steps and bytes, and forgets deleted steps. Returns True if there is something to read."""
        with self._lock:
            found = dict(self._list())
            for place in self._steps.keys() - found.keys():
                del self._steps[place]
            for place, paths in found.items():
                self._steps.setdefault(place, IndexedStep(*place, paths, self.root if self.root.is_dir() else None))
            steps = list(self._steps.values())
        return any([step.look() for step in steps])

    def _list(self) -> Iterator[tuple[tuple[int, Split], list[Path]]]:
        if not self.root.is_dir():
            yield (0, "train"), [self.root]
            return
        for entry in sorted(self.root.iterdir()):
            match = STEP_DIRECTORY.fullmatch(entry.name)
            if match is None:
                continue
            number = int(match[1])
            names = set(os.listdir(entry)) if entry.is_dir() else set()
            if names & {"trajectories.jsonl", "scored.jsonl"}:
                yield (number, "train"), [entry / "trajectories.jsonl", entry / "scored.jsonl"]
            if "eval.jsonl" in names:
                yield (number, "eval"), [entry / "eval.jsonl"]

    def steps(self) -> list[IndexedStep]:
        """Returns all steps by number, training before evaluation."""
        with self._lock:
            return [
                self._steps[place] for place in sorted(self._steps, key=lambda place: (place[0], place[1] == "eval"))
            ]

    def step(self, number: int, split: Split) -> IndexedStep | None:
        with self._lock:
            return self._steps.get((number, split))

    def find(self, trajectory: str) -> tuple[IndexedStep, IndexRow] | None:
        for step in self.steps():
            if (row := step.find(trajectory)) is not None:
                return step, row
        return None

    def read(self, until: float) -> bool:
        """Reads until this time.monotonic time, newest steps first. Returns True if everything was read."""
        for step in reversed(self.steps()):
            while not step.advance():
                if time.monotonic() > until:
                    return False
                time.sleep(0)  # an answer may be waiting for the lock
        return True

    @property
    def revision(self) -> int:
        return sum(step.revision + 1 for step in self.steps())

    @property
    def num_bytes(self) -> tuple[int, int]:
        """(bytes read, total bytes)."""
        pairs = [step.num_bytes for step in self.steps()]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    @property
    def modified(self) -> float:
        return max((step.modified for step in self.steps()), default=0.0)


def _stat(path: Path, root: Path | None) -> os.stat_result | None:
    """Returns the status of a regular file inside `root`."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat if is_inside(path, root) else None
