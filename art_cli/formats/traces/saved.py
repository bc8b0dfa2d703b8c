"""Saved attempts from a run or a file, split into steps and train/eval, loaded one at a time.

Works on running, killed and incomplete runs. A training step includes scored attempts and attempts still waiting for
scores.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from art_cli.formats.traces.spans import TracedRun
from art_cli.runs.durable import read_lines, read_object
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import DataError, UsageError, describe, printable

log = logging.getLogger(__name__)

STEPS = "step_*"


class SavedPart(NamedTuple):
    """The attempts in one step and split. Example: SavedPart(3, "train", (scored.jsonl, trajectories.jsonl))"""

    step: int
    split: str  # train or eval
    paths: tuple[Path, ...]  # earlier files take precedence
    within: Path | None = None  # run directory; links must not leave it

    def attempts(self) -> Iterator[Trajectory]:
        """Raises DataError for invalid lines."""
        seen: set[str] = set()
        for path in self.paths:
            for record in read_lines(path, ScoredTrajectory, within=self.within):
                if record.id not in seen:
                    seen.add(record.id)
                    yield record if _is_scored(record) else _unscored(record)


@contextmanager
def skipped(attempt: Trajectory, part: SavedPart) -> Iterator[None]:
    """Logs that an attempt is skipped if the block raises an error for its messages, which have no schema."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log.warning("%s: attempt %s is skipped: %s", part.paths[0], printable(attempt.id, limit=80), describe(error))


class Saved(NamedTuple):
    source: TracedRun
    config: dict[str, object]  # from config.json; empty for a file
    parts: list[SavedPart]


def saved_attempts(path: Path, *, step: int | None = None) -> Saved:
    """Returns the attempts under `path`, or those of one step. Raises UsageError without a run, DataError."""
    if not path.exists():
        raise UsageError(f"{path}: no such run or file")
    if not path.is_dir():
        parts = [SavedPart(0, "train", (path,))]
        return Saved(TracedRun(path.stem, run_id(path), "policy"), {}, parts)
    run = RunDir(path)
    if not run.config_path.exists() and not any(path.glob(STEPS)):
        raise UsageError(f"{path} is not a run directory: no config.json and no steps")
    config = read_object(run.config_path, within=run.root) if run.config_path.exists() else {}
    parts = [part for part in _parts(run) if step is None or part.step == step]
    if not parts:
        which = "" if step is None else f" of step {step}"
        raise DataError(f"no attempts{which} yet", path)
    return Saved(source_of(path, config), config, parts)


def source_of(root: Path, config: dict[str, object]) -> TracedRun:
    """Returns the run's identity for other tools, shared by trackers and `art log`."""
    model = config.get("model")
    base = model.get("base") if isinstance(model, dict) else None
    return TracedRun(root.resolve().name, run_id(root), str(base or "policy"))


def run_id(root: Path) -> str:
    """Returns an id that stays stable while the directory contains the same run. Example: "9be47d653f2a8c01"."""
    return hashlib.sha256(f"{root.resolve()}{RunDir(root).id()}".encode(errors="surrogateescape")).hexdigest()[:16]


def _parts(run: RunDir) -> Iterator[SavedPart]:
    numbers = {int(path.name[5:]) for path in run.root.glob(STEPS) if path.name[5:].isdecimal() and path.is_dir()}
    for step in sorted(numbers):
        train = tuple(path for path in (run.scored_path(step), run.trajectories_path(step)) if path.exists())
        if train:
            yield SavedPart(step, "train", train, run.root)
        if run.eval_path(step).exists():
            yield SavedPart(step, "eval", (run.eval_path(step),), run.root)


def _is_scored(record: ScoredTrajectory) -> bool:
    is_judged = record.reward is not None or bool(record.scores) or record.judge_settings is not None
    return is_judged or record.error is not None


def _unscored(record: ScoredTrajectory) -> Trajectory:
    """Returns the attempt without a verdict, so its reward is the rollout's reward."""
    return Trajectory(**{name: getattr(record, name) for name in Trajectory.__struct_fields__})
