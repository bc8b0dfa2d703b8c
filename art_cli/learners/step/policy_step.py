"""The policy step that every learner takes, through four calls: forward, backward, apply, finish. No torch.

    groups -> samples, in optimizer steps (step_samples.py) -> each: backward -> apply -> finish -> StepMetrics

A learner on a server sends `ahead` optimizer steps before waiting for a result.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

from art_cli.config.schema import AlgorithmConfig, LossConfig, TrainConfig
from art_cli.learners import Progress, StepMetrics
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.normalization import FinishedCounts
from art_cli.learners.samples import Sample
from art_cli.learners.step.step_samples import PlannedStep, plan_step
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.learners.step.training_record import StepRecord
from art_cli.runs.trajectory import LearnedTrajectory, ScoredTrajectory
from art_cli.runtime.errors import DriftError

Update = TypeVar("Update")  # a planned optimizer step
Sent = TypeVar("Sent")  # an optimizer step whose gradient is computed or requested
Applied = TypeVar("Applied")  # an optimizer step that is applied or requested


class Pass(NamedTuple):
    """Context shared by a step's optimizer steps, which add their numbers to it."""

    number: int  # optimizer step index, counted over all epochs
    statistics: StepStatistics
    record: StepRecord | None = None  # None if this optimizer step is not recorded
    advance: Callable[[], None] = lambda: None  # called after every counted pass
    # called for every uncounted pack, because a silent learner counts as dead
    heartbeat: Callable[[], None] = lambda: None


class Gradients(Protocol[Update, Sent, Applied]):
    """Computes and applies gradients. If an error occurs inside `taking`, the whole policy step is undone."""

    @property
    def ahead(self) -> int:
        """Number of optimizer steps to apply before waiting for a result."""

    def taking(self, plan: PlannedStep) -> AbstractContextManager[float]:
        """Holds the weights during a policy step. Yields the learning rate; counts the step at the end."""

    def plan(self, samples: Sequence[Sample], finished: FinishedCounts) -> Update:
        """Returns the optimizer step for the samples; `finished` is its part of the step's finished trajectories."""

    def count(self, update: Update, statistics: StepStatistics) -> int:
        """Counts samples and tokens. Returns the number of passes, which are reported as progress."""

    def forward(self, update: Update, at: Pass, *, is_first: bool) -> Update:
        """Returns the update with logprobs at the weights before the step, if the loss needs them.

        `is_first` means that the update is applied once, before all others, so `backward` itself runs at these weights.
        """

    def backward(self, update: Update, at: Pass) -> Sent:
        """Accumulates the update's gradient. The initial call also records the gap between engine and learner."""

    def apply(self, sent: Sent, at: Pass) -> Applied:
        """Applies the gradient."""

    def finish(self, applied: Applied, at: Pass) -> bool:
        """Waits for the optimizer step and adds its numbers. Returns whether further steps may follow."""

    def gather(self, statistics: StepStatistics, record: StepRecord | None) -> tuple[StepStatistics, StepRecord | None]:
        """Returns the combined numbers of all processes."""


def take_step(
    groups: Sequence[Sequence[ScoredTrajectory]],
    gradients: Gradients[Update, Sent, Applied],
    *,
    algorithm: Algorithm,
    loss: LossConfig | AlgorithmConfig,
    train: TrainConfig,
    progress: Progress | None,
) -> tuple[StepMetrics, list[LearnedTrajectory]]:
    """Takes one policy step. Returns its metrics and, with `train.record_learned`, one line per trajectory.

    Raises LearnerError if the step fails; DriftError if engine and learner hold different weights (contract 2).
    """
    begin, rate = time.perf_counter(), float("nan")
    record = StepRecord() if train.record_learned else None
    plan = plan_step(groups, algorithm, loss=loss, train=train)
    statistics = StepStatistics(_older(groups))
    if plan.parts:
        with gradients.taking(plan) as rate:
            _take_updates(plan, gradients, train, statistics, record, progress)
    statistics, record = gradients.gather(statistics, record)
    lines = [] if record is None else record.lines(groups)
    return statistics.metrics(plan.batch, learning_rate=rate, train_s=time.perf_counter() - begin), lines


def _take_updates(
    plan: PlannedStep,
    gradients: Gradients[Update, Sent, Applied],
    train: TrainConfig,
    statistics: StepStatistics,
    record: StepRecord | None,
    progress: Progress | None,
) -> None:
    """Takes the optimizer steps of all epochs. Stops early if `finish` returns False."""
    updates, epochs = [gradients.plan(part, plan.finished) for part in plan.parts], train.epochs_per_step
    passes = _PassCounter(progress, total=epochs * sum(gradients.count(each, StepStatistics()) for each in updates))
    updates = [
        gradients.forward(
            update, Pass(index, statistics, None, passes.advance, passes.heartbeat), is_first=index == 0 and epochs == 1
        )
        for index, update in enumerate(updates)
    ]
    waiting: deque[tuple[Applied, Pass]] = deque()
    for index, update in enumerate(updates * epochs):
        at = Pass(index, statistics, record if index < len(updates) else None, passes.advance, passes.heartbeat)
        if index < len(updates):
            gradients.count(update, statistics)
        sent = gradients.backward(update, at)
        # tokens from older policies may differ, so then only the probe at each weight load guards against drift
        if index == 0 and train.max_staleness == 0:
            _check_drift(gradients.gather(statistics, None)[0], train.max_logprob_gap)
        waiting.append((gradients.apply(sent, at), at))
        if len(waiting) == gradients.ahead and not gradients.finish(*waiting.popleft()):
            if record is not None:
                record.is_stopped = index + 1 < len(updates)
            break
    for applied, at in waiting:
        gradients.finish(applied, at)


def _check_drift(statistics: StepStatistics, bound: float) -> None:
    gap = statistics.logprob_gap
    if gap.mean > bound:
        raise DriftError(
            f"engine and learner differ by {gap.mean:.3g} nats per token on average (at most {gap.max:.3g}), over "
            f"train.max_logprob_gap = {bound:g}: they do not hold the same weights"
        )


def _older(groups: Sequence[Sequence[ScoredTrajectory]]) -> frozenset[str]:
    """Returns the ids of trajectories played for earlier steps than the newest one."""
    newest = max((trajectory.step for group in groups for trajectory in group), default=0)
    return frozenset(trajectory.id for group in groups for trajectory in group if trajectory.step < newest)


class _PassCounter:
    """Reports the number of completed passes to `progress`."""

    def __init__(self, progress: Progress | None, *, total: int) -> None:
        self.progress, self.total, self.num_done = progress, total, 0

    def advance(self) -> None:
        self.num_done += 1
        self.heartbeat()

    def heartbeat(self) -> None:
        if self.progress is not None:
            self.progress(self.num_done, self.total)
