"""The attempts that a run or a file has: one part for each step and split, read one attempt at a time.

A run is read as it stands: while it trains, after a kill, without any evaluation. A training step has its scored
attempts, and those of its attempts that are not scored yet.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from art_cli.formats.traces.spans import TracedRun
from art_cli.runs.durable import read_lines, read_object
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import DataError, UsageError

STEPS = "step_*"


class SavedPart(NamedTuple):
    """The attempts of one step and split. Example: SavedPart(3, "train", (scored.jsonl, trajectories.jsonl))"""

    step: int
    split: str  # train or eval
    paths: tuple[Path, ...]  # an attempt in an earlier file is not taken from a later one
    within: Path | None = None  # the run's directory, out of which no link may lead

    def attempts(self) -> Iterator[Trajectory]:
        """Raises DataError if a line is no trajectory."""
        seen: set[str] = set()
        for path in self.paths:
            for record in read_lines(path, ScoredTrajectory, within=self.within):
                if record.id not in seen:
                    seen.add(record.id)
                    yield record if _is_scored(record) else _unscored(record)


class Saved(NamedTuple):
    source: TracedRun
    config: dict[str, object]  # the run's, as in config.json; empty for a file
    parts: list[SavedPart]


def saved_attempts(path: Path, *, step: int | None = None) -> Saved:
    """Returns the attempts of `path`, those of one step if `step` is given.

    Raises UsageError if there is no such path, or it is no run; DataError if a file cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such run or file")
    if not path.is_dir():
        parts = [SavedPart(0, "train", (path,))]
        return Saved(TracedRun(path.stem, run_id(path), "policy"), {}, parts)
    run = RunDir(path)
    if not run.config_path.exists() and not any(path.glob(STEPS)):
        raise UsageError(f"{path} is no run: it has neither config.json nor a step")
    config = read_object(run.config_path, within=run.root) if run.config_path.exists() else {}
    parts = [part for part in _parts(run) if step is None or part.step == step]
    if not parts:
        which = "" if step is None else f" of step {step}"
        raise DataError(f"no attempts{which} yet", path)
    return Saved(source_of(path, config), config, parts)


def source_of(root: Path, config: dict[str, object]) -> TracedRun:
    """Returns the run's name for other tools, the same in the tracker of a run and in `art log` afterwards."""
    model = config.get("model")
    base = model.get("base") if isinstance(model, dict) else None
    return TracedRun(root.resolve().name, run_id(root), str(base or "policy"))


def run_id(root: Path) -> str:
    """Returns an id that is the same as long as the same run is in the directory. Example: "9be47d653f2a8c01"."""
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
    """Returns the same without a verdict, so that its reward is the one that the rollout returned."""
    return Trajectory(**{name: getattr(record, name) for name in Trajectory.__struct_fields__})
