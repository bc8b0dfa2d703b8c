"""Owns every path and file format of a run, for writing and for reading.

    runs/<name>/
      id                              what tells the run from an earlier one of the same name, which was removed
      config.json                     resolved, with nulls
      metrics.jsonl                   one line per step and split
      promise.json                    what `art plan` measured, and what it says that the run will take
      view.js                         the recipe's drawing of a state, if it has one
      step_0003/trajectories.jsonl    one trajectory per line, appended as it finishes
      step_0003/scored.jsonl
      step_0003/learned.jsonl         advantages and the learner's logprobs of each trajectory that the step trained on
      step_0003/rewards.jsonl         one line per group; only where later steps choose by it
      step_0003/eval.jsonl, evaluation.json     an evaluation of the policy at that step: its trajectories, its numbers
      checkpoints/step_0004/          a PEFT directory, optimizer and RNG, manifest.json last
      logs/

There is no state file, because what a run still owes follows from the files that exist. How files are written so that
they survive a kill is in durable.py; what makes a checkpoint whole is in manifest.py.
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
from art_cli.runs.promise import Promise
from art_cli.runs.trajectory import SCHEMA_VERSION, GroupRewards, LearnedTrajectory, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import CheckpointError, DataError, RunError, UncertainCheckpoint, one_line

log = logging.getLogger(__name__)
_warn_once = functools.lru_cache(maxsize=1000)(log.warning)  # a command may look for the newest several times
Record = TypeVar("Record")


class MetricsLine(msgspec.Struct, kw_only=True):
    """One line of metrics.jsonl: the numbers of one step and split ("train", "sft", "eval", "pause")."""

    schema_version: int = SCHEMA_VERSION
    step: int
    split: str
    metrics: dict[str, float]
    policy: str = ""  # digest of the policy that the step or the warm-up made, or that was evaluated; "" if unknown
    time: float  # seconds since the epoch


PAUSE = "pause"  # split of the lines of a pause; their metrics are stop rule -> value


class Evaluation(msgspec.Struct, kw_only=True):
    """evaluation.json: what one evaluation found, scenario by scenario, so that policies can be compared in pairs.

    Example: Evaluation(seconds=4.2, values={"reward": {"game-1": 1.0, "game-2": 0.0}})
    """

    schema_version: int = SCHEMA_VERSION
    seconds: float  # how long playing and judging took
    values: dict[str, dict[str, float]]  # metric -> scenario id -> mean over its attempts
    # "wins": the reward is the share of comparisons won against the first evaluation, by the judge; "judge": the judge
    # gave it; "own": the rollouts returned it; "": an older version wrote the file
    reward_is: str = ""
    attempts: int = 0  # number of attempts that it has in eval.jsonl; 0 in evaluations of versions that had none


Whole = TypeVar("Whole", Evaluation, Promise)  # a record that is a file of its own
NAMES = {Evaluation: "an evaluation", Promise: "a promise of art plan"}


class RunDir:
    """The directory of one run. Making the object touches nothing on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.id_path = root / "id"
        self.config_path = root / "config.json"
        self.metrics_path = root / "metrics.jsonl"
        self.curve_path = root / "curve.svg"  # drawn from metrics.jsonl, for people
        self.drawing_path = root / "view.js"  # the recipe's drawing of a state, for the page of `art view`
        self.promise_path = root / "promise.json"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.log_path = self.logs / "train.log"  # log of all starts of `art train`
        self.base = root / "base"  # a base model built by code, when the config names a builder

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
        """Returns the evaluation of the earliest step, with whose attempts a judge compares later ones, or None."""
        there = [path for path in self.root.glob("step_*/eval.jsonl") if STEP_NAME.fullmatch(path.parent.name)]
        return min(there, key=lambda path: int(path.parent.name[5:]), default=None)

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:04d}"

    def lines(self, path: Path, kind: type[Record]) -> Iterator[Record]:
        """The records of one of the run's files, as `read_lines` yields them; a link that leads out is refused."""
        return read_lines(path, kind, within=self.root)

    def trajectories(self, step: int) -> list[Trajectory]:
        return list(self.lines(self.trajectories_path(step), Trajectory))

    def scored(self, step: int) -> list[ScoredTrajectory]:
        return list(self.lines(self.scored_path(step), ScoredTrajectory))

    def learned(self, step: int) -> list[LearnedTrajectory]:
        """In the order in which the step trained on them; empty: it has no such file."""
        return list(self.lines(self.learned_path(step), LearnedTrajectory))

    def group_rewards(self, step: int) -> list[GroupRewards]:
        return list(self.lines(self.group_rewards_path(step), GroupRewards))

    def write_group_rewards(self, step: int, groups: Iterable[GroupRewards]) -> None:
        write_lines(self.group_rewards_path(step), groups)

    def checkpoint_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint directory, valid or not, ascending; other names are ignored."""
        named = [(STEP_NAME.fullmatch(path.name), path) for path in self.checkpoints.glob("step_*")]
        steps = {int(match[1]): path for match, path in named if match is not None and path.is_dir()}
        return sorted(step for step, path in steps.items() if path == self.checkpoint_path(step))

    def newest_checkpoint(self, steps: Iterable[int] | None = None) -> tuple[Path, Manifest] | None:
        """Returns the newest checkpoint that verifies, or the first of `steps` that does, or None.

        A warning has the reason for each checkpoint before it that was passed over.
        """
        for step in reversed(self.checkpoint_steps()) if steps is None else steps:
            try:
                return self.checkpoint_path(step), verify_checkpoint(self.checkpoint_path(step))
            except CheckpointError as error:
                _warn_once("passed over a checkpoint: %s", str(error))
        return None

    def set_aside(self, *, above: int) -> None:
        """Renames the checkpoints of steps above the newest that verifies, because training makes them anew.

        Under their own names they would count as the newest ones when checkpoints are pruned. Raises
        UncertainCheckpoint before that if one of them may be whole.
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
        """Returns the last line of each (step, split), in the order of their first lines."""
        newest = {(line.step, line.split): line for line in self.lines(self.metrics_path, MetricsLine)}
        return list(newest.values())

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Returns the means of each evaluated step."""
        return {line.step: line.metrics for line in self.metrics() if line.split == "eval"}

    def pauses(self) -> dict[str, tuple[int, float]]:
        """Stop rule -> the number of updates after which it last paused the run, and its value then."""
        lines = [line for line in self.lines(self.metrics_path, MetricsLine) if line.split == PAUSE]
        return {rule: (line.step, value) for line in lines for rule, value in line.metrics.items()}

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        write_file(self.evaluation_path(step), msgspec.json.encode(evaluation) + b"\n")

    def evaluation(self, step: int) -> Evaluation | None:
        """Returns the evaluation of a step, or None if there is no such file. Raises DataError if it cannot be read."""
        return self._object(self.evaluation_path(step), Evaluation)

    def write_promise(self, promise: Promise) -> None:
        write_file(self.promise_path, msgspec.json.format(msgspec.json.encode(promise)) + b"\n")

    def promise(self) -> Promise | None:
        """Returns what `art plan` promised, or None if it did not. Raises DataError if the file cannot be read."""
        return self._object(self.promise_path, Promise)

    def _object(self, path: Path, kind: type[Whole]) -> Whole | None:
        """Returns the record that a file holds, or None if there is no such file."""
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
        """Returns the number of attempts of a finished evaluation that its eval.jsonl, if there is one, has no more."""
        path = self.eval_path(step)
        if not evaluation.attempts or not path.exists():
            return 0
        return max(0, evaluation.attempts - _num_whole_lines(path, path.stat().st_size, self.root))

    def append_metrics(self, step: int, split: str, metrics: dict[str, float], policy: str = "") -> MetricsLine:
        """Returns the line that it wrote."""
        line = MetricsLine(step=step, split=split, metrics=metrics, policy=policy, time=time.time())
        with LineWriter(self.metrics_path) as writer:
            writer.append(line)
        return line

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process. The system releases the lock when the process dies, however it dies.

        Raises RunError: another process holds the lock, or a link leads out of the run, through which its owner would
        write or remove somebody else's files.
        """
        with lock_directory(self.root, self.logs / "lock"):
            for path in [*self.root.glob("*"), *self.root.glob("*/*")]:
                if path.is_symlink() and json_lines.leads_out(path, self.root):
                    raise RunError(f"{path}: a link that leads out of the run; move what it names here, or remove it")
            yield

    def claim_id(self) -> str:
        """Returns the id of the run, and writes one for a new run."""
        if not os.path.lexists(self.id_path) and not os.path.lexists(self.config_path):
            write_file(self.id_path, secrets.token_hex(8).encode() + b"\n")
        return self.id()

    def id(self) -> str:
        """Returns the id of the run. Example: "3f2a8c019be47d65". It is "" in a run that an older version began."""
        with contextlib.suppress(OSError):
            return json_lines.read_file(self.id_path, max_bytes=64, within=self.root).decode(errors="replace").strip()
        return ""

    def clean(self) -> None:
        """Removes unfinished files and directories of a killed writer."""
        for path in [*self.root.glob(".*.tmp"), *self.root.glob("*/.*.tmp")]:
            remove(path)


@functools.lru_cache(maxsize=1000)
def _num_whole_lines(path: Path, size: int, within: Path) -> int:
    """Returns the number of lines of a file of that size, kept because reports of a growing run ask again and again."""
    return sum(not json_lines.is_torn(line.data) for line in json_lines.lines(path, within=within))
