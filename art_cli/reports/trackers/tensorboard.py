"""Writes TensorBoard event files into the run's `tensorboard` directory: `tensorboard --logdir runs` shows all runs.

Only the package tensorboard is needed. Every call is flushed, so files of killed runs are readable. A resumed run
starts a new file, and TensorBoard joins the files.
"""

import os
import time
from typing import Any

from art_cli.config.sections.tracker_config import TensorBoardTrackerConfig
from art_cli.reports.trackers import COLUMNS, AttemptsTracker, Groups, TrackedRun, rewards, rows
from art_cli.runs.run_dir import MetricsLine

MAX_SHOWN = 8  # number of attempts in a step's text


class TensorBoardTracker(AttemptsTracker):
    def __init__(self, run: TrackedRun, config: TensorBoardTrackerConfig) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._scalar, self._histogram, self._text = scalar_pb, histogram_pb, text_pb
        directory = run.root / "tensorboard"
        directory.mkdir(exist_ok=True)
        # TensorBoard's writer would put the machine's name into the file name.
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.art.{os.getpid()}.{time.time_ns()}"
        self._file = (directory / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, line: MetricsLine) -> None:
        summaries = [self._scalar(f"{line.split}/{name}", value) for name, value in line.metrics.items()]
        self._write(line.step, line.time, summaries)

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        summaries = [self._text(f"{split}/samples", _as_text(step, groups))]
        if found := rewards(groups):
            summaries.append(self._histogram(f"{split}/rewards", found))
        self._write(step, time.time(), summaries)

    def _write(self, step: int, wall_time: float, summaries: list[object]) -> None:
        merged = self._summary()
        for summary in summaries:
            merged.MergeFrom(summary)
        self._add(self._event(step=step, wall_time=wall_time, summary=merged))

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _as_text(step: int, groups: Groups) -> str:
    """Returns the samples as Markdown, with texts in code blocks, which TensorBoard shows literally."""
    parts = []
    for row in rows(step, groups)[:MAX_SHOWN]:
        cells = dict(zip(COLUMNS, row, strict=True))
        parts.append(f"**{_number(cells['reward'])}** of {_line(cells['trajectory'])}")
        parts += [_block(str(cells[name])) for name in ("prompt", "reply", "error") if cells[name]]
    return "\n\n".join(parts) or "no attempts"


def _number(reward: float | None) -> str:
    return "no reward" if reward is None else f"{reward:.3g}"


def _line(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def _block(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return "\n".join("    " + line for line in clean.splitlines())
