"""Supervised training on examples: mean cross entropy, a fresh optimizer, early stopping, resumable. No torch.

It trains samples with weight 1 in the cross_entropy component (../samples.py). A checkpoint's `sft/` has its state.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.schema import SftConfig
from art_cli.learners import SFT_DIRECTORY, SftProgress
from art_cli.learners.samples import Sample
from art_cli.learners.sft.sft_batches import SftBatches, Sums, Taken
from art_cli.models.saved_weights import fitting
from art_cli.runtime.errors import LearnerError

SUMS_FILE = "sums.json"


class Sft(ABC):
    """One supervised warm-up, from start to end. A subclass computes and applies gradients.

    The loss on `evaluated` is measured before training, after every `eval_every` updates, and after the last update.
    With `patience`, the weights with the lowest loss (ties: the earliest) are kept and restored at the end.
    """

    ahead = 1  # number of optimizer steps to send before waiting for a result
    writes = True  # whether this process writes checkpoints

    def __init__(self, batches: SftBatches, evaluated: Sequence[Sample], config: SftConfig) -> None:
        self.batches, self.evaluated, self.config = batches, evaluated, config
        self.eval_every = config.eval_every or batches.epoch_updates
        self.sums = Sums()

    @abstractmethod
    def _send(self, samples: Sequence[Sample], index: int) -> Any:
        """Takes or sends the optimizer step with this index."""

    @abstractmethod
    def _finish(self, sent: Any) -> Taken:
        """Returns a step's numbers once it is taken."""

    @abstractmethod
    def _mean_loss(self, samples: Sequence[Sample]) -> float:
        """Returns the mean -log p over all the samples' targets, in nats."""

    @abstractmethod
    def _keep(self) -> None:
        """Keeps the current weights, which have the lowest evaluation loss so far."""

    @abstractmethod
    def _put_back(self) -> None:
        """Restores the kept weights, if any."""

    def _begin(self) -> None:  # noqa: B027
        """Prepares for training and evaluation."""

    def _save_state(self, directory: Path) -> None:  # noqa: B027
        """Writes state that sums.json does not contain."""

    def _load_state(self, directory: Path) -> None:  # noqa: B027
        """Restores that state."""

    def take(self, num_updates: int) -> SftProgress:
        """Takes the next `num_updates` optimizer steps, or all remaining steps if fewer are left.

        Raises LearnerError if a gradient or evaluation loss is not finite. A step with a non-finite gradient changes no
        weight.
        """
        if not self.sums.num_updates and not self.sums.evaluations:
            self._begin()
            if self.evaluated:
                self._evaluate()
        end = min(self.sums.num_updates + num_updates, self.batches.num_updates)
        while self.sums.num_updates < end and not self.is_done:
            due = end
            if self.evaluated:
                due = min(end, (self.sums.num_updates // self.eval_every + 1) * self.eval_every)
            self._take_until(due)
            if self.evaluated and (due % self.eval_every == 0 or due >= self.batches.num_updates):
                self._evaluate()
        if self.is_done:
            self._put_back()
        numbers = self.sums.numbers(
            epoch_updates=self.batches.epoch_updates, patience=self.config.patience, is_done=self.is_done
        )
        return SftProgress(num_updates=self.sums.num_updates, is_done=self.is_done, numbers=numbers)

    @property
    def is_done(self) -> bool:
        """True if all updates are taken, or the evaluation loss stopped the warm-up."""
        return self.sums.is_done(self.batches.num_updates, patience=self.config.patience)

    def save(self, directory: Path) -> None:
        """Writes the warm-up's state. All processes must call it; rank 0 writes."""
        path = directory / SFT_DIRECTORY
        path.mkdir(exist_ok=True)
        self._save_state(path)
        if self.writes:
            (path / SUMS_FILE).write_bytes(msgspec.json.encode(self.sums))

    def load(self, directory: Path) -> None:
        """Restores saved state exactly, given the same weights. Raises CheckpointError."""
        path = directory / SFT_DIRECTORY
        with fitting(path):
            self.sums = msgspec.json.decode((path / SUMS_FILE).read_bytes(), type=Sums)
            self._load_state(path)

    def _take_until(self, end: int) -> None:
        """Takes the optimizer steps before index `end`."""
        waiting: deque[Any] = deque()
        begin = time.perf_counter()
        for index in range(self.sums.num_updates, end):
            waiting.append(self._send(self.batches.batch(index), index))
            while len(waiting) == self.ahead or (waiting and index == end - 1):
                taken, now = self._finish(waiting.popleft()), time.perf_counter()
                self.sums.add_update(taken, epoch_updates=self.batches.epoch_updates, seconds=now - begin)
                begin = now

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        loss = self._mean_loss(self.evaluated)
        if not math.isfinite(loss):
            raise LearnerError(
                f"sft: evaluation loss {loss} at update {self.sums.num_updates}; lower sft.learning_rate"
            )
        is_best = self.sums.add_evaluation(loss, seconds=time.perf_counter() - begin)
        if self.config.patience is not None and is_best:
            self._keep()
