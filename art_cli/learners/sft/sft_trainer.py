"""Supervised training on examples: mean cross entropy, an optimizer of its own, early stop. It can be resumed.

It reads samples with weight 1 in the component cross_entropy (token_weights.py). It reads and writes `sft/` in a
checkpoint directory.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import SftConfig
from art_cli.learners import SFT_DIRECTORY, SftProgress
from art_cli.learners.gradient import LossGradient
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.samples import Sample
from art_cli.learners.sft.sft_batches import SftBatches
from art_cli.learners.sft.sft_sums import Sums
from art_cli.learners.step_statistics import StepStatistics
from art_cli.learners.token_weights import Floats
from art_cli.runtime.errors import CheckpointError, LearnerError, one_line

SUMS_FILE, BEST_FILE = "sums.json", "best.safetensors"


class Sft:
    """One supervised warm-up, from its first optimizer step to its last.

    The loss on `evaluated` is measured before the first update, after every `eval_every` and after the last. With
    `patience`, the weights of the lowest one, of equals the earliest, are kept and put back at the end.
    """

    def __init__(
        self, batches: SftBatches, evaluated: Sequence[Sample], config: SftConfig, optimizer: Optimizer
    ) -> None:
        self.batches, self.evaluated, self.config, self.optimizer = batches, evaluated, config, optimizer
        self.eval_every = config.eval_every or batches.epoch_updates
        self.sums = Sums()
        self._best: dict[str, Tensor] = {}  # the weights of the best evaluation; empty without `patience`

    def take(self, gradient: LossGradient, num_updates: int) -> SftProgress:
        """Takes the next `num_updates` optimizer steps, or as many as are left.

        Raises LearnerError: a gradient or an evaluation loss that is not finite; the step that had such a gradient
        changed no weight.
        """
        if self.evaluated and not self.sums.evaluations:
            self._evaluate(gradient.runner)
        end = min(self.sums.num_updates + num_updates, self.batches.num_updates)
        while self.sums.num_updates < end and not self.is_done:
            self._update(gradient, self.batches.batch(self.sums.num_updates))
            if self.evaluated and (self.sums.num_updates % self.eval_every == 0 or self._is_last):
                self._evaluate(gradient.runner)
        if self.is_done and self._best:
            self._put_back()
        return SftProgress(num_updates=self.sums.num_updates, is_done=self.is_done, numbers=self.numbers())

    @property
    def is_done(self) -> bool:
        """Whether all updates are taken, or the evaluation loss stopped it."""
        return self.sums.is_done(self.batches.num_updates, patience=self.config.patience)

    @property
    def _is_last(self) -> bool:
        return self.sums.num_updates >= self.batches.num_updates

    def numbers(self) -> dict[str, float]:
        """The numbers so far (sft_sums.py)."""
        return self.sums.numbers(
            epoch_updates=self.batches.epoch_updates, patience=self.config.patience, is_done=self.is_done
        )

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes what `load` continues from. All processes must call it; the first one writes."""
        place = directory / SFT_DIRECTORY
        place.mkdir(exist_ok=True)
        self.optimizer.save(place)
        ranks = self.optimizer.ranks
        best = {name: ranks.whole(tensor).contiguous() for name, tensor in self._best.items()}
        if ranks.rank == 0:
            save_file(best, place / BEST_FILE)
            (place / SUMS_FILE).write_bytes(msgspec.json.encode(self.sums))

    def load(self, directory: Path) -> None:
        """Continues bit for bit from what `save` wrote, given the same weights. Raises CheckpointError: unreadable."""
        place, ranks = directory / SFT_DIRECTORY, self.optimizer.ranks
        self.optimizer.load(place)
        try:
            self.sums = msgspec.json.decode((place / SUMS_FILE).read_bytes(), type=Sums)
            best, parameters = load_file(place / BEST_FILE), self.optimizer.parameters
            self._best = {name: ranks.part(tensor, parameters[name].detach()) for name, tensor in best.items()}
        except Exception as error:  # safetensors has errors of its own
            raise CheckpointError(f"{place}: {one_line(error)}") from error

    @torch.no_grad()
    def _put_back(self) -> None:
        for name, parameter in self.optimizer.parameters.items():
            parameter.copy_(self._best[name])

    # --- one update, one evaluation -----------------------------------------------------------------------------------

    def _update(self, gradient: LossGradient, samples: Sequence[Sample]) -> None:
        """Takes one optimizer step."""
        begin = time.perf_counter()
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
        statistics = StepStatistics.total(gradient.runner.ranks.gather(statistics, StepStatistics))
        [loss] = statistics.losses
        self.sums.add_update(
            loss,
            norm,
            trained=statistics.tokens_trained,
            computed=statistics.tokens_computed,
            epoch_updates=self.batches.epoch_updates,
            seconds=time.perf_counter() - begin,
        )

    def _evaluate(self, runner: PackRunner) -> None:
        begin = time.perf_counter()
        loss = mean_loss(runner, self.evaluated)
        if not math.isfinite(loss):
            raise LearnerError(
                f"sft: the evaluation loss after update {self.sums.num_updates} is {loss}; lower sft.learning_rate"
            )
        is_best = self.sums.add_evaluation(loss, seconds=time.perf_counter() - begin)
        if self.config.patience is not None and is_best:
            self._best = {name: p.detach().clone() for name, p in self.optimizer.parameters.items()}


@torch.no_grad()
def mean_loss(runner: PackRunner, samples: Sequence[Sample]) -> float:
    """-log p of the samples' targets in nats, the mean over all of them."""
    sums = np.zeros(2)
    for pack in runner.deal(samples):
        edges = torch.from_numpy(pack.terms.edges).to(runner.weights.device)
        logprobs = runner.run(pack).logprobs[edges].double()
        sums += -float(logprobs.sum()), len(logprobs)
    total, num_tokens = np.sum(runner.ranks.gather(sums, Floats), axis=0)
    return float(total / num_tokens)
