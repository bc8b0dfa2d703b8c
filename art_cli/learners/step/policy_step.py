"""The policy step that every learner takes, over a seam of calls: forward, backward, apply, finish. No torch.

    groups -> samples, in optimizer steps (step_samples.py) -> each: backward -> apply -> finish -> StepMetrics

A learner whose weights are on a server sends `ahead` optimizer steps before it waits for the first.
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

Update = TypeVar("Update")  # an optimizer step to come
Sent = TypeVar("Sent")  # an optimizer step whose gradient is computed or on its way
Applied = TypeVar("Applied")  # an optimizer step that is applied or on its way


class Pass(NamedTuple):
    """The numbers of a step, to which each optimizer step adds."""

    number: int  # index of the optimizer step over all epochs
    statistics: StepStatistics
    record: StepRecord | None = None  # None if the optimizer step is not recorded
    done: Callable[[], None] = lambda: None  # called once for each of its passes
    heartbeat: Callable[[], None] = lambda: None  # called for every other pack, because a silent learner counts as dead


class Gradients(Protocol[Update, Sent, Applied]):
    """Computes gradients and applies them. After an error inside `taking`, no optimizer step of the step is left."""

    @property
    def ahead(self) -> int:
        """The number of optimizer steps that are applied before the first of them is finished."""

    def taking(self, plan: PlannedStep) -> AbstractContextManager[float]:
        """Holds the weights during a step. Yields the learning rate; counts the step at the end."""

    def plan(self, samples: Sequence[Sample], finished: FinishedCounts) -> Update:
        """Returns the optimizer step on the samples; `finished` is its part of the step's finished trajectories."""

    def count(self, update: Update, statistics: StepStatistics) -> int:
        """Counts the samples and tokens. Returns the number of passes; each pass is reported as progress."""

    def forward(self, update: Update, at: Pass, *, is_first: bool) -> Update:
        """Returns the update with logprobs at the weights before the step, if its loss will need them.

        `is_first` means that it is taken once and before all others, so that `backward` runs at these weights.
        """

    def backward(self, update: Update, at: Pass) -> Sent:
        """Adds the update's gradient up. The first one adds the gap between engine and learner, too."""

    def apply(self, sent: Sent, at: Pass) -> Applied:
        """Takes the optimizer step."""

    def finish(self, applied: Applied, at: Pass) -> bool:
        """Waits until the step is taken and adds its numbers. Returns whether others may follow."""

    def gather(self, statistics: StepStatistics, record: StepRecord | None) -> tuple[StepStatistics, StepRecord | None]:
        """Returns the numbers of all processes."""


def take_step(
    groups: Sequence[Sequence[ScoredTrajectory]],
    gradients: Gradients[Update, Sent, Applied],
    *,
    algorithm: Algorithm,
    loss: LossConfig | AlgorithmConfig,
    train: TrainConfig,
    progress: Progress | None,
) -> tuple[StepMetrics, list[LearnedTrajectory]]:
    """Takes one policy step. Returns its metrics and, with `train.record_learned`, a line for each trajectory.

    Raises LearnerError if the step fails; DriftError if engine and learner hold different weights (contract 2).
    """
    begin, rate = time.perf_counter(), float("nan")
    record = StepRecord() if train.record_learned else None
    plan = plan_step(groups, algorithm, loss=loss, train=train, record=record)
    statistics = StepStatistics(_replayed(groups))
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
    """Takes the optimizer steps of all epochs, and stops early after a step that no other may follow."""
    updates, epochs = [gradients.plan(part, plan.finished) for part in plan.parts], train.epochs_per_step
    done = _Counter(progress, total=epochs * sum(gradients.count(each, StepStatistics()) for each in updates))
    updates = [
        gradients.forward(
            update, Pass(index, statistics, done=done, heartbeat=done.heartbeat), is_first=index == 0 and epochs == 1
        )
        for index, update in enumerate(updates)
    ]
    waiting: deque[tuple[Applied, Pass]] = deque()
    for index, update in enumerate(updates * epochs):
        at = Pass(index, statistics, record if index < len(updates) else None, done, done.heartbeat)
        if index < len(updates):
            gradients.count(update, statistics)
        sent = gradients.backward(update, at)
        if index == 0 and train.max_staleness == 0:  # older policies' tokens may differ; the probe of each load guards
            _check_drift(gradients.gather(statistics, None)[0], train.max_logprob_gap)
        waiting.append((gradients.apply(sent, at), at))
        if len(waiting) == gradients.ahead and not gradients.finish(*waiting.popleft()):
            if record is not None:
                record.is_stopped = True
            break
    for applied, at in waiting:
        gradients.finish(applied, at)


def _check_drift(statistics: StepStatistics, bound: float) -> None:
    gap = statistics.gap
    if gap.mean > bound:
        raise DriftError(
            f"engine and learner differ by {gap.mean:.3g} nats per token on average (at most {gap.max:.3g}), over "
            f"train.max_logprob_gap = {bound:g}: they do not hold the same weights"
        )


def _replayed(groups: Sequence[Sequence[ScoredTrajectory]]) -> frozenset[str]:
    """Returns the ids of trajectories that were played for an earlier step than the newest ones."""
    newest = max((trajectory.step for group in groups for trajectory in group), default=0)
    return frozenset(trajectory.id for group in groups for trajectory in group if trajectory.step < newest)


class _Counter:
    """Calls `progress` with the number of passes done; call it after each."""

    def __init__(self, progress: Progress | None, *, total: int) -> None:
        self.progress, self.total, self.num_done = progress, total, 0

    def __call__(self) -> None:
        self.num_done += 1
        self.heartbeat()

    def heartbeat(self) -> None:
        if self.progress is not None:
            self.progress(self.num_done, self.total)
