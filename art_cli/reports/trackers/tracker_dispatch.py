"""Trackers: passes a run's metrics and trajectories to its trackers, each in its thread, without waiting.

    loop: log, log_trajectories -> a bounded queue for each tracker -> its thread -> the tracker's method

A tracker is disabled if a method raises or takes longer than CALL_TIMEOUT_S. A slow tracker loses calls when the queue
is full. Both cause a single warning, and the number of dropped calls at the end.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from art_cli.config.schema import OwnTrackerConfig, RunConfig
from art_cli.reports.trackers import TrackedRun, Tracker, make_tracker, trackers_of
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import UsageError, describe
from art_cli.runtime.secrets import without_secrets

log = logging.getLogger(__name__)

MAX_QUEUED = 32  # queued calls per tracker; a step makes two or three
START_TIMEOUT_S = 30.0  # longest wait for a tracker's constructor, so mistakes show immediately
CALL_TIMEOUT_S = 120.0  # longest duration of a call
CLOSE_TIMEOUT_S = 60.0  # longest wait for queued calls and `close` at the end, for all trackers

Groups = Sequence[Sequence[ScoredTrajectory]]
Attempt = TypeVar("Attempt", bound=Trajectory)


class Trackers:
    """All trackers of a run. Only `close` waits for trackers, with a deadline."""

    def __init__(self, threads: Sequence["TrackerThread"]) -> None:
        self.threads = threads

    def log(self, line: MetricsLine) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.log(msgspec.structs.replace(line, metrics=dict(line.metrics))))

    def log_trajectories(self, step: int, groups: Groups) -> None:
        for thread in self.threads:
            thread.put(lambda tracker: tracker.log_trajectories(step, _copies(groups, ScoredTrajectory)))

    def log_evaluation(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Calls the trackers that have this method."""
        for thread in self.threads:
            thread.put(lambda tracker: _call(tracker, "log_evaluation", step, lambda: _copies(groups, Trajectory)))

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Calls the trackers that have this method."""
        for thread in self.threads:
            thread.put(lambda tracker: _call(tracker, "log_checkpoint", step, lambda: path))

    async def close(self) -> None:
        if self.threads:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self.threads:
            thread.end()
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def open_trackers(config: RunConfig, root: Path, directory: Path) -> Trackers:
    """Starts the configured trackers. Raises UsageError if a tracker is missing or not installed."""
    run = TrackedRun(root.name, root, without_secrets(config.model_dump(mode="json")))
    threads = []
    for each in trackers_of(config):
        name = each.entry if isinstance(each, OwnTrackerConfig) else each.name
        threads.append(TrackerThread(name, partial(make_tracker, each, run, directory)))
    try:
        for thread in threads:
            thread.wait_for_start(START_TIMEOUT_S)
    except UsageError:
        for thread in threads:
            thread.end()
        raise
    return Trackers(threads)


class TrackerThread:
    """A tracker behind a bounded queue. Its thread is a daemon, so a hanging call does not block the process's exit."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self._make = name, make
        self.is_left_out = False
        self._num_offered = 0  # calls made by the run; written by the run's thread only
        self._num_done = 0  # finished calls; written by this thread only
        self._is_warned = False
        self._mistake: UsageError | None = None
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._is_made = threading.Event()
        self._call_began: float | None = time.monotonic()  # None between calls
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self._num_offered - self._num_done

    @property
    def thread_id(self) -> int | None:
        """Returns the system's thread id, which identifies its processor time, while the thread is alive."""
        return self._thread.ident if self._thread.is_alive() else None

    def wait_for_start(self, timeout_s: float) -> None:
        """Raises UsageError if the tracker could not be made because of a user mistake."""
        self._is_made.wait(timeout_s)
        if self._mistake is not None:
            raise self._mistake

    def put(self, call: Callable[[Tracker], None]) -> None:
        """Queues the call, or drops it if the tracker is disabled or the queue is full."""
        self._num_offered += 1
        self._check_deadline()
        if self.is_left_out:
            return
        if self._calls.qsize() < MAX_QUEUED:
            self._calls.put(call)
        else:
            self._warn("it is slower than the run; what it cannot take is dropped")

    def end(self) -> None:
        """Asks the thread to finish queued calls and close the tracker."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end, and logs the number of dropped calls."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._leave_out("it did not finish before the end of the run")
        if self.num_dropped:
            log.warning("tracker %s: %d of %d calls were dropped", self.name, self.num_dropped, self._num_offered)

    def _work(self) -> None:
        try:
            tracker = self._make()
        except UsageError as error:
            self._mistake = error
            return
        except BaseException as error:  # boundary to an SDK or a user's class
            self._leave_out(describe(error))
            return
        finally:
            self._is_made.set()
        self._call_began = None
        while (call := self._calls.get()) is not None:
            if not self.is_left_out:
                self._num_done += self._is_done(partial(call, tracker))
        self._is_done(tracker.close)

    def _is_done(self, call: Callable[[], None]) -> bool:
        """Makes the call. If it raises, disables the tracker and returns False."""
        self._call_began = time.monotonic()
        try:
            call()
        except BaseException as error:  # boundary to an SDK or a user's class, which may even raise SystemExit
            self._leave_out(describe(error))
            return False
        finally:
            self._call_began = None
        return True

    def _check_deadline(self) -> None:
        began = self._call_began
        if began is not None and time.monotonic() - began > CALL_TIMEOUT_S:
            self._leave_out(f"a call has been running for {time.monotonic() - began:.0f} s")

    def _leave_out(self, why: str) -> None:
        self.is_left_out = True
        self._warn(f"{why}; it is skipped from here on")

    def _warn(self, text: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning("tracker %s: %s", self.name, text)


def _call(tracker: Tracker, name: str, step: int, argument: Callable[[], object]) -> None:
    """Calls an optional tracker method."""
    if callable(method := getattr(tracker, name, None)):
        method(step, argument())


def _copies(groups: Sequence[Sequence[Attempt]], kind: type[Attempt]) -> list[list[Attempt]]:
    """Returns copies of the groups, because trackers may modify them while the learner reads them."""
    decoder = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
    return [decoder.decode(msgspec.msgpack.encode(group)) for group in groups]
