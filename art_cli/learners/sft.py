"""Supervised training on demos: assistant tokens, mean cross entropy, an optimizer of its own. It can be resumed.

It reads samples with weight 1 in the component cross_entropy (token_weights.py). It reads and writes `sft/` in a
checkpoint directory.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from art_cli.config.schema import SftConfig
from art_cli.errors import CheckpointError, LearnerError, one_line
from art_cli.learners import Progress
from art_cli.learners.gradient import LossGradient
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.samples import Sample
from art_cli.learners.step_statistics import StepStatistics

STATE_DIRECTORY, SUMS_FILE = "sft", "sums.json"


class Sums(msgspec.Struct, kw_only=True):
    """sft/sums.json: what was done so far. The reported numbers are computed from these."""

    num_updates: int = 0  # optimizer steps taken
    loss_first: float = 0.0  # loss of the first optimizer step, nats per token
    loss_epoch: float = 0.0  # sum of the losses of the current epoch's optimizer steps
    grad_norm: float = 0.0  # sum over optimizer steps, before clipping
    tokens_trained: int = 0
    tokens_computed: int = 0
    train_s: float = 0.0


class Sft:
    """One supervised warm-up, from its first optimizer step to its last, over transcripts made into samples.

    Each epoch has its own order, drawn from `seed`. So the number of steps done determines those that are left.
    """

    def __init__(
        self, transcripts: Sequence[list[Sample]], config: SftConfig, optimizer: Optimizer, *, seed: int
    ) -> None:
        self.transcripts, self.config, self.optimizer, self.seed = transcripts, config, optimizer, seed
        self.epoch_updates = -(-len(transcripts) // config.batch_size)
        self.num_updates = config.epochs * self.epoch_updates  # optimizer steps in all epochs
        self.sums = Sums()

    def batch(self, index: int) -> list[Sample]:
        """The samples of the optimizer step with that index."""
        epoch, place = divmod(index, self.epoch_updates)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.transcripts))
        chosen = order[place * self.config.batch_size :][: self.config.batch_size]
        return [sample for index in chosen for sample in self.transcripts[index]]

    def take(self, gradient: LossGradient, num_updates: int, progress: Progress | None = None) -> None:
        """Takes the next `num_updates` optimizer steps, or as many as are left.

        Raises LearnerError: a gradient that is not finite; the step that had it changed no weight.
        """
        for index in range(self.sums.num_updates, min(self.sums.num_updates + num_updates, self.num_updates)):
            begin = time.perf_counter()
            self._update(gradient, self.batch(index), is_first=index % self.epoch_updates == 0)
            self.sums.train_s += time.perf_counter() - begin
            if progress is not None:
                progress(index + 1, self.num_updates)

    def numbers(self) -> dict[str, float]:
        """The numbers so far. `loss` is the mean over the current epoch, `loss_first` the loss of the first update."""
        sums, num = self.sums, self.sums.num_updates
        if num == 0:
            return {"num_updates": 0.0}
        return {
            "loss": sums.loss_epoch / ((num - 1) % self.epoch_updates + 1),
            "loss_first": sums.loss_first,
            "grad_norm": sums.grad_norm / num,
            "num_updates": float(num),
            "tokens_trained": float(sums.tokens_trained),
            "tokens_computed": float(sums.tokens_computed),
            "train_s": sums.train_s,
        }

    def save(self, directory: Path) -> None:
        """Writes what `load` continues from. All processes must call it; the first one writes."""
        place = directory / STATE_DIRECTORY
        place.mkdir(exist_ok=True)
        self.optimizer.save(place)
        if self.optimizer.ranks.rank == 0:
            (place / SUMS_FILE).write_bytes(msgspec.json.encode(self.sums))

    def load(self, directory: Path) -> None:
        """Continues bit for bit from what `save` wrote, given the same weights. Raises CheckpointError: unreadable."""
        place = directory / STATE_DIRECTORY
        self.optimizer.load(place)
        try:
            self.sums = msgspec.json.decode((place / SUMS_FILE).read_bytes(), type=Sums)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place / SUMS_FILE}: {one_line(error)}") from error

    def _update(self, gradient: LossGradient, samples: Sequence[Sample], *, is_first: bool) -> None:
        """Takes one optimizer step; `is_first` if it is the first of its epoch."""
        statistics = StepStatistics()
        update = gradient.plan(samples)
        statistics.add_counts(update.packs)
        gradient.accumulate(update, statistics, is_first=False)
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            self.optimizer.clear()
            names = sorted({sample.trajectory_id for sample in samples})
            raise LearnerError(
                f"sft: the gradient is not finite, in one of {', '.join(names)}; lower sft.learning_rate"
            )
        self.optimizer.counts.num_steps += 1
        self.optimizer.update()
        statistics = StepStatistics.total(gradient.runner.ranks.gather(statistics))
        sums, [loss] = self.sums, statistics.losses
        sums.loss_first = sums.loss_first if sums.num_updates else loss
        sums.loss_epoch = loss if is_first else sums.loss_epoch + loss
        sums.grad_norm += norm
        sums.tokens_trained += statistics.tokens_trained
        sums.tokens_computed += statistics.tokens_computed
        sums.num_updates += 1
