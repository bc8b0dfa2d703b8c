"""Sends metrics and traces to trackio: a local SQLite file that `trackio show` opens, or a Space.

Samples are `trackio.Trace`s: whole conversations with tool calls. Trackio's output on stdout is redirected to stderr,
because stdout is for results.
"""

import contextlib
import sys
from typing import Any

from art_cli.config.sections.tracker_config import TrackioTrackerConfig
from art_cli.formats.traces.spans import calls_of, reward_of, shortened
from art_cli.reports.trackers import AttemptsTracker, Groups, TrackedRun, chosen, rewards
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import Json, Trajectory

MAX_MESSAGES = 200  # messages per trace, from both ends


class TrackioTracker(AttemptsTracker):
    def __init__(self, run: TrackedRun, config: TrackioTrackerConfig) -> None:
        import trackio

        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=config.project,
                name=f"{run.root.name}-{run.id[:6]}",  # distinguishes runs with the same name in different directories
                space_id=config.space,
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, line: MetricsLine) -> None:
        numbers = {f"{line.split}/{name}": value for name, value in line.metrics.items()}
        self._run.log(numbers, step=line.step)

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        shown: dict[str, Any] = {f"{split}/samples": [self._trace(attempt) for attempt in chosen(groups)]}
        if found := rewards(groups):
            shown[f"{split}/rewards"] = self._trackio.Histogram(found)
        self._run.log(shown, step=step)

    def _trace(self, attempt: Trajectory) -> Any:
        messages = [_message(each) for each in attempt.messages]
        if len(messages) > MAX_MESSAGES:
            half = MAX_MESSAGES // 2
            messages = [*messages[:half], *messages[-half:]]
        facts = {
            "session_id": attempt.group_id,
            "trajectory": attempt.id,
            "reward": reward_of(attempt),
            "status": "error" if attempt.error else "ok",
            "error": attempt.error,
            "duration_ms": round(attempt.duration_s * 1000),
            "num_calls": len(calls_of(attempt)),
            "tokens": attempt.num_sampled,
        }
        return self._trackio.Trace(messages, metadata={k: v for k, v in facts.items() if v is not None})

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


def _message(message: Json) -> Json:
    """Shortens the message's text."""
    content = message.get("content")
    return {**message, "content": shortened(content) if isinstance(content, str) else content}
