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
from art_cli.errors import CheckpointError, LearnerError, one_line
from art_cli.learners import SFT_DIRECTORY, SftProgress
from art_cli.learners.gradient import LossGradient
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.pack_runner import PackRunner
from art_cli.learners.samples import Sample
from art_cli.learners.sft_batches import SftBatches
from art_cli.learners.step_statistics import StepStatistics

SUMS_FILE, BEST_FILE = "sums.json", "best.safetensors"


class Sums(msgspec.Struct, kw_only=True):
    """sft/sums.json: what was done so far. The reported numbers are computed from these."""

    num_updates: int = 0  # optimizer steps taken
    loss_first: float = 0.0  # loss of the first optimizer step, nats per token
    loss_epoch: float = 0.0  # sum of the losses of the current epoch's optimizer steps
    grad_norm: float = 0.0  # sum over optimizer steps, before clipping
    tokens_trained: int = 0
    tokens_computed: int = 0
    evaluations: list[tuple[int, float]] = []  # (optimizer steps taken before it, loss in nats per token)
    train_s: float = 0.0
    eval_s: float = 0.0


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
        """Whether all updates are taken, or the evaluation loss has not fallen for `patience` evaluations."""
        losses, patience = [loss for _, loss in self.sums.evaluations], self.config.patience
        if patience is None or not losses:
            return self._is_last
        return self._is_last or len(losses) - 1 - losses.index(min(losses)) >= patience

    @property
    def _is_last(self) -> bool:
        return self.sums.num_updates >= self.batches.num_updates

    def numbers(self) -> dict[str, float]:
        """The numbers so far. `loss` is the mean over the current epoch, `loss_first` the loss of the first update.

        `eval_loss` is the newest evaluation's; of a warm-up with `patience` that is done, the best one's, whose weights
        are kept.
        """
        sums, num = self.sums, self.sums.num_updates
        if num == 0:
            return {"num_updates": 0.0}
        return {
            "loss": sums.loss_epoch / ((num - 1) % self.batches.epoch_updates + 1),
            "loss_first": sums.loss_first,
            **self._evaluation_numbers(),
            "grad_norm": sums.grad_norm / num,
            "num_updates": float(num),
            "tokens_trained": float(sums.tokens_trained),
            "tokens_computed": float(sums.tokens_computed),
            "train_s": sums.train_s,
        }

    def _evaluation_numbers(self) -> dict[str, float]:
        sums = self.sums
        if not sums.evaluations:
            return {}
        numbers = {"eval_loss": sums.evaluations[-1][1], "eval_loss_first": sums.evaluations[0][1]}
        if self.config.patience is not None:
            best, loss = min(sums.evaluations, key=lambda pair: pair[1])
            numbers |= {"eval_loss_best": loss, "best_update": float(best)}
            if self.is_done:
                numbers["eval_loss"] = loss
        return numbers | {"num_evaluations": float(len(sums.evaluations)), "eval_s": sums.eval_s}

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
        begin, is_first = time.perf_counter(), self.sums.num_updates % self.batches.epoch_updates == 0
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
        sums.train_s += time.perf_counter() - begin

    def _evaluate(self, runner: PackRunner) -> None:
        begin = time.perf_counter()
        loss = mean_loss(runner, self.evaluated)
        if not math.isfinite(loss):
            raise LearnerError(
                f"sft: the evaluation loss after update {self.sums.num_updates} is {loss}; lower sft.learning_rate"
            )
        if self.config.patience is not None and all(loss < before for _, before in self.sums.evaluations):
            self._best = {name: p.detach().clone() for name, p in self.optimizer.parameters.items()}
        self.sums.evaluations.append((self.sums.num_updates, loss))
        self.sums.eval_s += time.perf_counter() - begin


@torch.no_grad()
def mean_loss(runner: PackRunner, samples: Sequence[Sample]) -> float:
    """-log p of the samples' targets in nats, the mean over all of them."""
    sums = np.zeros(2)
    for pack in runner.deal(samples):
        edges = torch.from_numpy(pack.terms.edges).to(runner.weights.device)
        logprobs = runner.run(pack).logprobs[edges].double()
        sums += -float(logprobs.sum()), len(logprobs)
    total, num_tokens = np.sum(runner.ranks.gather(sums), axis=0)
    return float(total / num_tokens)
