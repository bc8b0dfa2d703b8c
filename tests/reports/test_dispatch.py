"""A tracker receives calls in order; a failing, hanging or slow tracker only causes a warning."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from art_cli.reports.trackers import TrackedRun, Tracker, make_tracker
from art_cli.reports.trackers import tracker_dispatch as dispatch
from art_cli.reports.trackers.tracker_dispatch import Trackers, TrackerThread
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import UsageError
from tests.support.processes.waiting import wait_until


class Recorder:
    """A tracker that records its calls; `act` is called first."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act = act
        self.lines: list[MetricsLine] = []
        self.groups: list[tuple[int, Sequence[Sequence[ScoredTrajectory]]]] = []
        self.is_closed = False

    def log(self, line: MetricsLine) -> None:
        self.act()
        self.lines.append(line)

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        self.act()
        self.groups.append((step, groups))

    def close(self) -> None:
        self.is_closed = True


def line(step: int) -> MetricsLine:
    return MetricsLine(step=step, split="train", metrics={"loss": 0.5}, time=1.0)


def opened(*trackers: Tracker) -> Trackers:
    threads = [TrackerThread(f"t{index}", lambda tracker=tracker: tracker) for index, tracker in enumerate(trackers)]
    for thread in threads:
        thread.wait_for_start(10.0)
    return Trackers(threads)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records]


def test_each_tracker_gets_everything_in_order_and_is_closed_last(warnings: Callable[[], list[str]]) -> None:
    one, other = Recorder(), Recorder()
    trackers = opened(one, other)
    group = [ScoredTrajectory(id="a", group_id="g", group_size=1, index=0, reward=1.0)]
    for step in range(3):
        trackers.log_trajectories(step, [group])
        trackers.log(line(step))
    asyncio.run(trackers.close())
    for tracker in (one, other):
        assert [each.step for each in tracker.lines] == [0, 1, 2]
        assert [step for step, _ in tracker.groups] == [0, 1, 2]
        assert tracker.groups[0][1] == [group] and tracker.groups[0][1][0][0] is not group[0]
        assert tracker.is_closed
    assert warnings() == []


def test_checkpoints_and_evaluations_go_to_those_that_take_them(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    class Taker(Recorder):
        taken: list[object]

        def log_checkpoint(self, step: int, path: Path) -> None:
            self.taken = [(step, path)]

        def log_evaluation(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
            self.taken.append((step, groups))

    plain, taker = Recorder(), Taker()
    trackers = opened(plain, taker)
    played = Trajectory(id="a", group_id="g", group_size=1, index=0, returned_reward=1.0)
    trackers.log_checkpoint(2, tmp_path)
    trackers.log_evaluation(2, [[played]])
    asyncio.run(trackers.close())
    assert taker.taken == [(2, tmp_path), (2, [[played]])]
    assert plain.is_closed and warnings() == []


@pytest.mark.parametrize("error", [ValueError("no disk\nhere"), SystemExit(3)])
def test_a_tracker_that_raises_is_left_out_and_the_other_goes_on(
    error: BaseException, warnings: Callable[[], list[str]]
) -> None:
    def fail() -> None:
        raise error

    broken, sound = Recorder(fail), Recorder()
    trackers = opened(broken, sound)
    for step in range(5):
        trackers.log(line(step))
    asyncio.run(trackers.close())
    assert len(sound.lines) == 5 and broken.is_closed
    first, last = warnings()
    assert first.startswith(f"tracker t0: {type(error).__name__}: ") and first.endswith("it is skipped from here on")
    assert last == "tracker t0: 5 of 5 calls were dropped"


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(dispatch, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(dispatch, "CLOSE_TIMEOUT_S", 0.2)
    released = threading.Event()
    trackers = opened(Recorder(lambda: released.wait(60) and None))
    trackers.log(line(0))
    begin = time.monotonic()
    wait_until(lambda: time.monotonic() - begin > 0.1)
    for step in range(1, 100):
        trackers.log(line(step))
    asyncio.run(trackers.close())
    assert time.monotonic() - begin < 10.0
    first, last = warnings()
    assert first.startswith("tracker t0: a call has been running for")
    assert last == "tracker t0: 100 of 100 calls were dropped"
    released.set()


def test_a_slow_tracker_loses_what_its_queue_has_no_room_for(warnings: Callable[[], list[str]]) -> None:
    released = threading.Event()
    slow = Recorder(lambda: released.wait(60) and None)
    trackers = opened(slow)
    for step in range(dispatch.MAX_QUEUED + 20):
        trackers.log(line(step))
    released.set()
    asyncio.run(trackers.close())
    assert dispatch.MAX_QUEUED <= len(slow.lines) <= dispatch.MAX_QUEUED + 1  # one call may have left the queue early
    steps = [each.step for each in slow.lines]
    assert steps[: dispatch.MAX_QUEUED] == list(range(dispatch.MAX_QUEUED)) and steps == sorted(steps)
    assert len(warnings()) == 2 and "slower than the run" in warnings()[0] and slow.is_closed


def test_a_constructor_that_fails_or_hangs_costs_the_run_nothing(warnings: Callable[[], list[str]]) -> None:
    def fail() -> Tracker:
        raise OSError("no network")

    released = threading.Event()

    def hang() -> Tracker:
        released.wait(60)
        return Recorder()

    threads = [TrackerThread("broken", fail), TrackerThread("hanging", hang)]
    threads[0].wait_for_start(10.0)
    threads[1].wait_for_start(0.01)
    trackers = Trackers(threads)
    trackers.log(line(0))
    released.set()
    asyncio.run(trackers.close())
    assert warnings()[0] == "tracker broken: OSError: no network; it is skipped from here on"
    assert threads[0].num_dropped == 1 and threads[1].num_dropped == 0


def test_a_mistake_in_the_configuration_is_raised_at_the_start(tmp_path: Path) -> None:
    from art_cli.config.schema import OwnTrackerConfig

    (tmp_path / "mine.py").write_text("class T:\n    def __init__(self, run): pass\n    def log(self, line): pass\n")

    def start(entry: str) -> None:
        config, run = OwnTrackerConfig(name="entry", entry=entry), TrackedRun("x", tmp_path, {})
        TrackerThread(entry, lambda: make_tracker(config, run, tmp_path)).wait_for_start(30.0)

    with pytest.raises(UsageError, match="T is not a tracker: it lacks the method log_trajectories and no close"):
        start("mine.py:T")
    with pytest.raises(UsageError, match="has no 'U'"):
        start("mine.py:U")
