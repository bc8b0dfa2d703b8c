"""Where metrics and trajectories go besides the run's own files: the Tracker protocol and the table of built-ins.

metrics.jsonl and scored.jsonl are written by the loop itself and are the record. A tracker is a copy for people to look
at. Each one works in a thread of its own behind a bounded queue (dispatch.py). A tracker that fails, hangs or is slow
is reported once, and never stops or slows a run. A tracker imports its SDK inside itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from art_cli.config.schema import OwnTrackerConfig, TrackerConfig
from art_cli.errors import UsageError
from art_cli.plugins import resolve
from art_cli.run_dir import MetricsLine
from art_cli.trajectory import ScoredTrajectory

BUILT_INS = {"wandb": "art_cli.trackers.wandb:WandbTracker"}
METHODS = ("log", "log_trajectories", "close")


class TrackedRun(NamedTuple):
    """What a tracker is told about its run."""

    name: str
    root: Path  # the run's directory
    config: dict[str, Any]  # the whole configuration, as in config.json


class Tracker(Protocol):
    """Made as `Class(run, section)`; a user's own as `Class(run, **options)`. One thread makes all calls, in order."""

    def log(self, line: MetricsLine) -> None:
        """Takes one line of metrics.jsonl, just written."""

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Takes every group of a training step, scored, before the learner's update. A resumed step comes again."""

    def close(self) -> None:
        """Comes last, when the run ends in whatever way short of a kill."""


def make_tracker(config: TrackerConfig, run: TrackedRun, directory: Path) -> Tracker:
    """The tracker that a section names; `entry` is relative to `directory`.

    Raises UsageError (it is not installed, not there or lacks a method), and whatever its constructor raises.
    """
    if isinstance(config, OwnTrackerConfig):
        kind = resolve(config.entry, base=directory)
        tracker: Tracker = kind(run, **config.options)
    else:
        kind = resolve(BUILT_INS[config.name], base=directory)
        tracker = kind(run, config)
    if missing := [name for name in METHODS if not callable(getattr(tracker, name, None))]:
        raise UsageError(f"{kind.__name__} is no tracker: it has no method {' and no '.join(missing)}")
    return tracker
