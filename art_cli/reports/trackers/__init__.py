"""Trackers receive metrics and trajectories in addition to the run's files: protocol and built-in trackers.

The loop itself writes metrics.jsonl and scored.jsonl, which are the record. A tracker is a copy for people. Each
tracker works in a separate thread behind a bounded queue (tracker_dispatch.py). A tracker that fails, hangs or is slow
causes a single warning, and never stops or slows a run. Trackers import their SDK lazily.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from art_cli.chat.requests import text_of
from art_cli.config.schema import NoTrackerConfig, OwnTrackerConfig, RunConfig, TrackerConfig
from art_cli.formats.traces.saved import run_id
from art_cli.formats.traces.spans import reward_of
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import UsageError
from art_cli.runtime.plugins import resolve

# name -> class, and the modules that it needs. The extra with the tracker's name installs them.
BUILT_INS = {
    "wandb": ("wandb:WandbTracker", ["wandb"]),
    "tensorboard": ("tensorboard:TensorBoardTracker", ["tensorboard"]),
    "mlflow": ("mlflow:MlflowTracker", ["mlflow", "sqlalchemy", "alembic"]),
    "trackio": ("trackio:TrackioTracker", ["trackio"]),
    "langfuse": ("otel:LangfuseTracker", ["opentelemetry.proto"]),
    "otel": ("otel:OtelTracker", ["opentelemetry.proto"]),
}
METHODS = ("log", "log_trajectories", "close")

Groups = Sequence[Sequence[Trajectory]]
MAX_ROWS = 32  # number of trajectories in a step's table
MAX_TEXT = 4_000  # characters of a cell
COLUMNS = ["step", "group", "trajectory", "reward", "returned reward", "turns", "tokens", "error", "prompt", "reply"]


class TrackedRun(NamedTuple):
    """Facts about the run for trackers."""

    name: str
    root: Path  # run directory
    config: dict[str, Any]  # the whole configuration, as in config.json

    @property
    def id(self) -> str:
        """Identifies the run directory, also after resuming. Example: "3f2a8c019be47d65"."""
        return run_id(self.root)

    @property
    def steps(self) -> int:
        """The run's number of steps, or 0 if unknown."""
        train = self.config.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) else 0

    def sends_checkpoint(self, step: int, every: int) -> bool:
        """Returns True for each `every`-th checkpoint and the last; always False if `every` is 0."""
        return every > 0 and (step % every == 0 or step == self.steps)


class Tracker(Protocol):
    """Constructed as `Class(run, section)`; user classes as `Class(run, **options)`. All calls come from one thread, in
    order.

    Two methods are optional. `log_checkpoint(step, path)` receives each checkpoint, whose directory may be pruned some
    steps later. `log_evaluation(step, groups)` receives every attempt of an evaluation.
    """

    def log(self, line: MetricsLine) -> None:
        """Receives a new line of metrics.jsonl."""

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Receives a training step's scored groups before the learner's update. Resumed steps are repeated."""

    def close(self) -> None:
        """The last call, however the run ends, except after a kill."""


class AttemptsTracker:
    """Sends attempts of training and evaluations to the same method."""

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        self.log_attempts("train", step, groups)

    def log_evaluation(self, step: int, groups: Groups) -> None:
        self.log_attempts("eval", step, groups)

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        raise NotImplementedError


def make_tracker(config: TrackerConfig, run: TrackedRun, directory: Path) -> Tracker:
    """Makes the tracker named in a section; `entry` is relative to `directory`.

    Raises UsageError if the tracker is not installed, is missing or lacks a method, and any error of its constructor.
    """
    if isinstance(config, OwnTrackerConfig):
        kind = resolve(config.entry, base=directory)
        tracker: Tracker = kind(run, **config.options)
    else:
        kind = _built_in(config.name, directory)
        tracker = kind(run, config)
    if missing := [name for name in METHODS if not callable(getattr(tracker, name, None))]:
        raise UsageError(f"{kind.__name__} is not a tracker: it lacks the method {' and no '.join(missing)}")
    return tracker


def trackers_of(config: RunConfig) -> list[TrackerConfig]:
    """Returns the configured trackers."""
    return [each for each in (config.tracker, *config.trackers) if not isinstance(each, NoTrackerConfig)]


def check_tracker(config: TrackerConfig) -> None:
    """Raises UsageError for a missing package or missing keys of a built-in tracker. No server is asked."""
    if isinstance(config, NoTrackerConfig | OwnTrackerConfig):
        return
    if check := getattr(_built_in(config.name, Path()), "check_keys", None):
        check()


def _built_in(name: str, base: Path) -> Any:
    """Returns a built-in tracker's class. Raises UsageError for a missing package."""
    entry, needed = BUILT_INS[name]
    for module in needed:
        if not _is_there(module):
            package = module.replace(".", "-")
            raise UsageError(f"tracker {name}: {package} is not installed; pip install 'art-cli[{name}]'")
    return resolve(f"{__name__}.{entry}", base=base)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # missing parent package
        return False


# --- the table of samples: the best and the worst attempt of each group as plain rows ---------------------------------


def rows(step: int, groups: Groups) -> list[list[Any]]:
    """Returns at most MAX_ROWS rows with the values of COLUMNS."""
    return [_row(step, attempt) for attempt in chosen(groups)]


def chosen(groups: Groups) -> list[Trajectory]:
    """Returns the attempts of the table: of each group the best one, then the worst."""
    return [attempt for group in groups[: MAX_ROWS // 2] for attempt in _extremes(group)]


def rewards(groups: Groups) -> list[float]:
    """Returns all known rewards."""
    return [reward for group in groups for attempt in group if (reward := reward_of(attempt)) is not None]


def _extremes(group: Sequence[Trajectory]) -> Iterator[Trajectory]:
    ranked = sorted(group, key=lambda attempt: float("-inf") if (r := reward_of(attempt)) is None else r)
    yield from ranked[:-2:-1]
    yield from ranked[:1] if len(ranked) > 1 else []


def _row(step: int, attempt: Trajectory) -> list[Any]:
    said = [(message.get("role"), text_of(message.get("content"))[:MAX_TEXT]) for message in attempt.messages]
    prompt = next((text for role, text in said if role == "user"), "")
    reply = next((text for role, text in reversed(said) if role == "assistant"), "")
    score = [reward_of(attempt), attempt.returned_reward]
    counts = [len(attempt.turns), attempt.num_sampled]
    return [step, attempt.group_id, attempt.id, *score, *counts, attempt.error, prompt, reply]
