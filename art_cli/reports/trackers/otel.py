"""Sends each attempt as an OpenTelemetry trace while the run goes on. `art log --otlp` sends the same afterwards.

A step that a receiver does not take is lost to it, and the next one is tried: there is one warning, and the number of
lost attempts at the end.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

from art_cli.config.sections.tracker_config import OtelTrackerConfig
from art_cli.formats.traces.otlp import OtlpSender, headers_from, traces_url, url_from
from art_cli.formats.traces.saved import source_of
from art_cli.formats.traces.spans import spans_of
from art_cli.reports.trackers import TrackedRun
from art_cli.reports.trackers.table import Groups
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import DeliveryError

log = logging.getLogger(__name__)

# Between two attempts this thread leaves Python's interpreter lock to the loop's thread, which would otherwise wait for
# it up to 5 ms each time that an operation of torch ends.
PAUSE_S = 0.001


class OtelTracker:
    def __init__(self, run: TrackedRun, config: OtelTrackerConfig) -> None:
        url = url_from(os.environ) if config.url is None else traces_url(config.url)
        self.source = source_of(run.root, run.config)
        self._sender = OtlpSender(url, headers_from(os.environ), timeout_s=config.timeout_s)
        self._max_groups = config.max_groups
        self._losses = Losses("otel")

    def log(self, line: MetricsLine) -> None:
        """Traces hold no metrics of a step."""

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        self._send("train", groups)

    def log_evaluation(self, step: int, groups: Groups) -> None:
        self._send("eval", groups)

    def _send(self, split: str, groups: Groups) -> None:
        attempts = [attempt for group in groups[: self._max_groups] for attempt in group]
        spans = (span for each in unhurried(attempts) for span in spans_of(each, self.source, split=split))
        self._losses.watch(lambda: self._sender.send(spans), len(attempts))

    def close(self) -> None:
        self._losses.tell()


def unhurried(attempts: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Yields the attempts, with a pause before each."""
    for attempt in attempts:
        time.sleep(PAUSE_S)
        yield attempt


class Losses:
    """Counts attempts that a receiver refused. Logs the reason of the first, and the number at the end."""

    def __init__(self, name: str) -> None:
        self._name, self._num, self._num_lost = name, 0, 0

    def watch(self, send: Callable[[], object], num: int) -> None:
        """Sends `num` attempts; a DeliveryError counts them as lost."""
        self._num += num
        try:
            send()
        except DeliveryError as error:
            if not self._num_lost:
                log.warning("tracker %s: %s; the next step is tried again", self._name, error)
            self._num_lost += num

    def tell(self) -> None:
        if self._num_lost:
            log.warning("tracker %s: %d of %d attempts were lost", self._name, self._num_lost, self._num)
