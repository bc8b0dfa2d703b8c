"""TorchSft: a supervised warm-up on weights in this process, or sharded across processes."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import SftConfig
from art_cli.learners import Progress
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.samples import Floats, Sample
from art_cli.learners.sft.sft_batches import SftBatches, Taken
from art_cli.learners.sft.sft_trainer import Sft
from art_cli.learners.step.gradient import LossGradient
from art_cli.learners.step.policy_step import Pass
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.runtime.errors import LearnerError

BEST_FILE = "best.safetensors"


class TorchSft(Sft):
    def __init__(
        self,
        batches: SftBatches,
        evaluated: Sequence[Sample],
        config: SftConfig,
        gradient: LossGradient,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(batches, evaluated, config)
        self.gradient, self.optimizer = gradient, optimizer
        self.writes = optimizer.ranks.rank == 0
        self.progress: Progress | None = None  # progress callback for the current call
        self._best: dict[str, Tensor] = {}  # weights at the best evaluation; empty without `patience`

    def _send(self, samples: Sequence[Sample], index: int) -> Taken:
        statistics = StepStatistics()
        update = self.gradient.plan(samples)
        for pack in update.packs:
            statistics.add_counts(pack.samples, num_computed=len(pack.token_ids))
        self.gradient.accumulate(update, Pass(0, statistics, advance=self._report))
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            self.optimizer.clear()
            names = sorted({sample.trajectory_id for sample in samples})
            raise LearnerError(f"sft: no finite gradient for one of {', '.join(names)}; lower sft.learning_rate")
        self.optimizer.update()
        self.optimizer.counts.num_steps += 1
        statistics = StepStatistics.total(self.optimizer.ranks.gather(statistics, StepStatistics))
        [loss] = statistics.losses
        return Taken(loss, norm, statistics.tokens_trained, statistics.tokens_computed)

    def _finish(self, sent: Taken) -> Taken:
        return sent

    @torch.no_grad()
    def _mean_loss(self, samples: Sequence[Sample]) -> float:
        runner, sums = self.gradient.runner, np.zeros(2)
        for pack in runner.deal(samples):
            edges = torch.from_numpy(pack.terms.edges).to(runner.weights.device)
            logprobs = runner.run(pack).logprobs[edges].cpu().double()
            sums += -float(logprobs.sum()), len(logprobs)
            self._report()
        total, num_tokens = np.sum(runner.ranks.gather(sums, Floats), axis=0)
        return float(total / num_tokens)

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.sums.num_updates, self.batches.num_updates)

    def _keep(self) -> None:
        self._best = {name: p.detach().clone() for name, p in self.optimizer.parameters.items()}

    @torch.no_grad()
    def _put_back(self) -> None:
        for name, best in self._best.items():
            self.optimizer.parameters[name].copy_(best)

    def _save_state(self, directory: Path) -> None:
        self.optimizer.save(directory)
        best = self.optimizer.ranks.collect(self._best)
        if self.writes:
            save_file(best, directory / BEST_FILE)

    def _load_state(self, directory: Path) -> None:
        self.optimizer.load(directory)
        best, parameters, ranks = load_file(directory / BEST_FILE), self.optimizer.parameters, self.optimizer.ranks
        self._best = {name: ranks.part(tensor, parameters[name].detach()) for name, tensor in best.items()}
