"""Owns every path and file format of a run, for reading and writing.

    runs/<name>/
      id                              distinguishes the run from a removed run with the same name
      config.json                     resolved, with nulls
      metrics.jsonl                   one line per step and split
      promise.json                    measurements and forecast of `art plan`
      view.js                         the recipe's drawing of a state (optional)
      step_0003/trajectories.jsonl    one trajectory per line, appended as it finishes
      step_0003/scored.jsonl
      step_0003/learned.jsonl         advantages and learner logprobs of each trained trajectory
      step_0003/rewards.jsonl         one line per group; only written if later steps need it to choose scenarios
      step_0003/eval.jsonl, evaluation.json     evaluation of the step's policy: trajectories, numbers
      checkpoints/step_0004/          a PEFT directory, optimizer and RNG, manifest.json last
      logs/

There is no state file: the existing files determine the remaining work. durable.py makes writes survive a kill;
manifest.py defines complete checkpoints.
"""

import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from art_cli.runs import json_lines
from art_cli.runs.durable import (
    LineWriter,
    lock_directory,
    newer_schema,
    read_lines,
    read_object,
    remove,
    write_file,
    write_lines,
)
from art_cli.runs.manifest import STEP_NAME, Manifest, verify_checkpoint
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.promise import Promise
from art_cli.runs.trajectory import SCHEMA_VERSION, GroupRewards, LearnedTrajectory, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import CheckpointError, DataError, RunError, UncertainCheckpoint, one_line

log = logging.getLogger(__name__)
# a command may search for the newest checkpoint several times
_warn_once = functools.lru_cache(maxsize=1000)(log.warning)
Record = TypeVar("Record")
PAUSE = "pause"  # split for pauses; their metrics map a stop rule to its value


class MetricsLine(msgspec.Struct, kw_only=True):
    """A line of metrics.jsonl, with the numbers for a step and split ("train", "sft", "eval", "pause")."""

    schema_version: int = SCHEMA_VERSION
    step: int
    split: str
    metrics: dict[str, float]
    policy: str = ""  # digest of the resulting (or evaluated) policy; "" if unknown
    time: float  # seconds since the epoch


class Evaluation(msgspec.Struct, kw_only=True):
    """evaluation.json: results by scenario, so that policies can be compared in pairs.

    Example: Evaluation(seconds=4.2, values={"reward": {"game-1": 1.0, "game-2": 0.0}})
    """

    schema_version: int = SCHEMA_VERSION
    seconds: float  # time for playing and judging
    values: dict[str, dict[str, float]]  # metric -> scenario id -> mean over attempts
    # source of the reward: "wins" (share of judge comparisons won against the first evaluation), "judge", "own"
    # (returned by rollouts), or "" in files from older versions
    reward_is: str = ""
    attempts: int = 0  # number of attempts in eval.jsonl; 0 in older files


Whole = TypeVar("Whole", Evaluation, Promise)  # records with their own file
NAMES = {Evaluation: "an evaluation", Promise: "a promise of art plan"}


class RunDir:
    """A run's directory. Creating a RunDir does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.id_path = root / "id"
        self.config_path = root / "config.json"
        self.metrics_path = root / "metrics.jsonl"
        self.curve_path = root / "curve.svg"  # drawn from metrics.jsonl, for people
        self.drawing_path = root / "view.js"  # the recipe's drawing of a state, shown by `art view`
        self.promise_path = root / "promise.json"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.log_path = self.logs / "train.log"  # log of all `art train` starts
        self.base = root / "base"  # base model built by code, when the config names a builder

    def trajectories_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "trajectories.jsonl"

    def scored_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "scored.jsonl"

    def learned_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "learned.jsonl"

    def group_rewards_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "rewards.jsonl"

    def eval_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "eval.jsonl"

    def evaluation_path(self, step: int) -> Path:
        return self.root / f"step_{step:04d}" / "evaluation.json"

    def first_eval_path(self) -> Path | None:
        """Returns the earliest evaluation. A judge compares later attempts with it."""
        there = [path for path in self.root.glob("step_*/eval.jsonl") if STEP_NAME.fullmatch(path.parent.name)]
        return min(there, key=lambda path: int(path.parent.name[5:]), default=None)

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:04d}"

    def lines(self, path: Path, kind: type[Record]) -> Iterator[Record]:
        """Yields records like `read_lines`. Links that lead out of the run are refused."""
        return read_lines(path, kind, within=self.root)

    def trajectories(self, step: int) -> list[Trajectory]:
        return list(self.lines(self.trajectories_path(step), Trajectory))

    def scored(self, step: int) -> list[ScoredTrajectory]:
        return list(self.lines(self.scored_path(step), ScoredTrajectory))

    def learned(self, step: int) -> list[LearnedTrajectory]:
        """Returns records in training order, or [] if the file is missing."""
        return list(self.lines(self.learned_path(step), LearnedTrajectory))

    def group_rewards(self, step: int) -> list[GroupRewards]:
        return list(self.lines(self.group_rewards_path(step), GroupRewards))

    def write_group_rewards(self, step: int, groups: Iterable[GroupRewards]) -> None:
        write_lines(self.group_rewards_path(step), groups)

    def checkpoint_steps(self) -> list[int]:
        """Returns all steps with a checkpoint directory (valid or not), ascending. Other names are ignored."""
        named = [(STEP_NAME.fullmatch(path.name), path) for path in self.checkpoints.glob("step_*")]
        steps = {int(match[1]): path for match, path in named if match is not None and path.is_dir()}
        return sorted(step for step, path in steps.items() if path == self.checkpoint_path(step))

    def newest_checkpoint(self, steps: Iterable[int] | None = None) -> tuple[Path, Manifest] | None:
        """Returns the newest valid checkpoint, or the earliest in `steps`, with a warning for each skipped one."""
        for step in reversed(self.checkpoint_steps()) if steps is None else steps:
            try:
                return self.checkpoint_path(step), verify_checkpoint(self.checkpoint_path(step))
            except CheckpointError as error:
                _warn_once("passed over a checkpoint: %s", str(error))
        return None

    def set_aside(self, *, above: int) -> None:
        """Renames the checkpoints above the newest verified step, because training repeats their steps.

        Otherwise pruning would count them as newest checkpoints. Raises UncertainCheckpoint before any renaming if a
        checkpoint may be intact.
        """
        paths = [self.checkpoint_path(step) for step in self.checkpoint_steps() if step > above]
        for path in paths:
            try:
                verify_checkpoint(path)
            except UncertainCheckpoint:
                raise
            except CheckpointError:
                continue
        for path in paths:
            aside = path.with_suffix(".damaged")
            remove(aside)
            path.rename(aside)
            log.warning("%s: does not verify; kept as %s", path, aside.name)

    def metrics(self) -> list[MetricsLine]:
        """Returns the last line of each (step, split), ordered by first appearance."""
        newest = {(line.step, line.split): line for line in self.lines(self.metrics_path, MetricsLine)}
        return list(newest.values())

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Returns the metric means of each evaluated step."""
        return {line.step: line.metrics for line in self.metrics() if line.split == "eval"}

    def pauses(self) -> dict[str, tuple[int, float]]:
        """Maps each stop rule to the latest pause: (number of updates, value)."""
        lines = [line for line in self.lines(self.metrics_path, MetricsLine) if line.split == PAUSE]
        return {rule: (line.step, value) for line in lines for rule, value in line.metrics.items()}

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        write_file(self.evaluation_path(step), msgspec.json.encode(evaluation) + b"\n")

    def evaluation(self, step: int) -> Evaluation | None:
        """Returns the evaluation of a step. Raises DataError if the file cannot be read or has a huge number."""
        found = self._object(self.evaluation_path(step), Evaluation)
        for means in found.values.values() if found is not None else ():
            if huge := [value for value in means.values() if abs(value) > MAX_NUMBER]:
                raise DataError(f"the value {huge[0]:g} is beyond {MAX_NUMBER:g}", self.evaluation_path(step))
        return found

    def write_promise(self, promise: Promise) -> None:
        write_file(self.promise_path, msgspec.json.format(msgspec.json.encode(promise)) + b"\n")

    def promise(self) -> Promise | None:
        """Returns the promise of `art plan`. Raises DataError if the file cannot be read."""
        return self._object(self.promise_path, Promise)

    def _object(self, path: Path, kind: type[Whole]) -> Whole | None:
        """Decodes a JSON file. A missing file gives None."""
        if not os.path.lexists(path):
            return None
        try:
            found = msgspec.convert(read_object(path, within=self.root), kind)
        except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
            raise DataError(f"not {NAMES[kind]}: {one_line(error)}", path) from error
        if found.schema_version > SCHEMA_VERSION:
            raise DataError(newer_schema(found.schema_version), path)
        return found

    def num_lost(self, step: int, evaluation: Evaluation) -> int:
        """Returns how many attempts of a finished evaluation are missing from eval.jsonl. A missing file counts as
        0."""
        path = self.eval_path(step)
        if not evaluation.attempts or not path.exists():
            return 0
        return max(0, evaluation.attempts - _num_whole_lines(path, path.stat().st_size, self.root))

    def append_metrics(self, step: int, split: str, metrics: dict[str, float], policy: str = "") -> MetricsLine:
        """Returns the written line."""
        line = MetricsLine(step=step, split=split, metrics=metrics, policy=policy, time=time.time())
        with LineWriter(self.metrics_path) as writer:
            writer.append(line)
        return line

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process. The system releases the lock when the process dies.

        Raises RunError if another process holds the lock, or if a link leads out of the run. Through such a link, the
        lock's owner would write or remove other people's files.
        """
        with lock_directory(self.root, self.logs / "lock"):
            for path in [*self.root.glob("*"), *self.root.glob("*/*")]:
                if path.is_symlink() and json_lines.leads_out(path, self.root):
                    raise RunError(f"{path}: a link that leads out of the run; move what it names here, or remove it")
            yield

    def claim_id(self) -> str:
        """Returns the run's id. New runs get one first."""
        if not os.path.lexists(self.id_path) and not os.path.lexists(self.config_path):
            write_file(self.id_path, secrets.token_hex(8).encode() + b"\n")
        return self.id()

    def id(self) -> str:
        """Returns the run's id. Example: "3f2a8c019be47d65". Runs from older versions give ""."""
        with contextlib.suppress(OSError):
            return json_lines.read_file(self.id_path, max_bytes=64, within=self.root).decode(errors="replace").strip()
        return ""

    def clean(self) -> None:
        """Removes unfinished files and directories of a killed writer."""
        for path in [*self.root.glob(".*.tmp"), *self.root.glob("*/.*.tmp")]:
            remove(path)


@functools.lru_cache(maxsize=1000)
def _num_whole_lines(path: Path, size: int, within: Path) -> int:
    """Counts complete lines. Cached by file size, because reports of a growing run ask repeatedly."""
    return sum(not json_lines.is_torn(line.data) for line in json_lines.lines(path, within=within))
