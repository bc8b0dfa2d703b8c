"""Where numbers go besides metrics.jsonl: the Tracker protocol and the table of built-ins.

metrics.jsonl is written by the loop itself and is the record; a tracker is a copy of it for people to look at. A
tracker imports its SDK inside itself, and one that fails is reported once and does not stop a run.
"""

from pathlib import Path
from typing import Any, Protocol

from art_cli.config.schema import NoTrackerConfig, RunConfig, WandbTrackerConfig
from art_cli.run_dir import MetricsLine


class Tracker(Protocol):
    def log(self, line: MetricsLine) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    def log(self, line: MetricsLine) -> None:
        pass

    def close(self) -> None:
        pass


def make_tracker(config: RunConfig, root: Path, resolved: dict[str, Any]) -> Tracker:
    """The tracker of a run whose directory is `root`. Raises UsageError: its SDK is not installed."""
    match config.tracker:
        case NoTrackerConfig():
            return NoTracker()
        case WandbTrackerConfig():
            from art_cli.trackers.wandb import WandbTracker

            return WandbTracker(config.tracker, name=config.name, root=root, resolved=resolved)
