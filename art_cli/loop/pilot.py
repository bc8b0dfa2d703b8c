"""Pilots: trial steps with other learning rates, undone afterwards; gradient noise; peak memory.

Requires a learner with weights in this process.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art_cli.config.schema import TrainConfig
from art_cli.learners import Learner
from art_cli.learners.samples import Sample
from art_cli.learners.step.policy_step import Pass
from art_cli.learners.step.step_samples import plan_step
from art_cli.learners.step.step_statistics import StepStatistics
from art_cli.loop import trial_update
from art_cli.models.device import memory_there
from art_cli.runs.promise import NORMAL_80, MemoryNeed, NoiseScale, Pilot
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError, OutOfMemory

if TYPE_CHECKING:
    from torch import Tensor

    from art_cli.learners.torch_learner import TorchLearner

log = logging.getLogger(__name__)

SAFE = 0.5  # a row is tried if it is expected to take less than this share of the available memory
MAX_ENTRIES = 30_000_000  # maximum number of stored gradient entries; larger gradients are subsampled


class Pilots:
    """A learner's pilots on the same groups. Each starts from the checkpoint `start` and restores it."""

    def __init__(self, learner: Learner, groups: Sequence[Sequence[ScoredTrajectory]], start: Path) -> None:
        """Raises LearnerError if there is nothing to train on."""
        from art_cli.learners.torch_learner import TorchLearner

        assert isinstance(learner, TorchLearner), f"{learner} has its weights elsewhere"
        self.learner, self.groups, self.start = learner, groups, start
        learner.load(start)
        plan = plan_step(groups, learner.algorithm, loss=learner.loss, train=learner.train_config)
        self._samples = [sample for part in plan.parts for sample in part]
        if not self._samples:
            raise LearnerError("no group has signal, so pilots are impossible")
        learner.score(self._samples[0].token_ids.tolist())  # decides whether packs hold
        with self._running():
            whole = learner.gradient.plan(self._samples, plan.finished)
            self._whole = learner.gradient.look_ahead(whole, Pass(0, StepStatistics()), always=True)

    def take(self, rate: float) -> Pilot:
        """Takes a full step at this rate, without rate warm-up and without the bound on its KL, and undoes it."""
        learner, own = self.learner, self.learner.train_config
        begin, kl, clipped, is_failed = time.perf_counter(), math.nan, math.nan, False
        try:
            _set(learner, own.model_copy(update={"learning_rate": rate, "warmup_steps": 0, "max_kl": None}))
            clipped = learner.step(self.groups).clip_fraction
            seconds = time.perf_counter() - begin
            with self._running():
                kl = learner.gradient.divergence(self._whole)
        except LearnerError as error:
            seconds, is_failed = time.perf_counter() - begin, True
            log.warning("pilot at learning rate %g: %s", rate, error)
        finally:
            _set(learner, own)
            learner.load(self.start)
        clip_fraction = None if math.isnan(clipped) else clipped
        return Pilot(rate, kl if math.isfinite(kl) else None, clip_fraction, seconds, is_failed)

    def noise_scale(self) -> NoiseScale | None:
        """Returns the noise scale over the step's groups; None for a single group or lack of memory."""
        if len(self.groups) == 1:
            return None
        import torch

        try:
            gradients = torch.stack([*self._gradients()]).double()
        except LearnerError as error:
            log.warning("noise scale: %s", error)
            return None
        return noise_scale(gradients @ gradients.T, len(self.groups))

    def _gradients(self) -> "Iterator[Tensor]":
        """Yields each group's contribution to the gradient, subsampled if large. Groups without signal are skipped."""
        import torch

        learner, parameters = self.learner, list(self.learner.parameters.values())
        stride = math.ceil(sum(each.numel() for each in parameters) * len(self.groups) / MAX_ENTRIES)
        for members in self.groups:
            ids = {each.id for each in members}
            samples: list[Sample] = [sample for sample in self._samples if sample.trajectory_id in ids]
            if not samples:
                continue
            try:
                with self._running():
                    update = learner.gradient.plan(samples)._replace(counts=self._whole.counts)
                    learner.gradient.accumulate(update, Pass(0, StepStatistics()))
                yield torch.cat([p.grad.flatten()[::stride].float().cpu() for p in parameters if p.grad is not None])
            finally:
                for optimizer in learner.optimizers:
                    optimizer.clear()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self.learner.naming_memory(), self.learner.runner.running():
            yield

    def memory(self, longest: int) -> MemoryNeed | None:
        """Returns a micro-batch's peak memory; None if unknown or impossible to try.

        `longest` is the longest row. A micro-batch has the learner's usual number of tokens, limited by the step's
        tokens.
        """
        learner, weights = self.learner, self.learner.weights
        there, num_tokens = memory_there(weights), sum(len(each.token_ids) for each in self._samples)
        tokens = max(longest, min(learner.runner.micro_batch_tokens, num_tokens), 4)
        short, own = min(tokens // 2, trial_update.MIN_SECOND), learner.train_config
        parts = learner.loss.parts
        try:
            epochs = min(own.epochs_per_step, 2)  # more epochs have the same peak
            _set(learner, own.model_copy(update={"epochs_per_step": epochs}))
            # creates AdamW's state
            first = trial_update.step(learner, short, vocabulary=weights.vocabulary, parts=parts)
            if first.num_updates == 0:
                return None  # the loss needs more than made-up attempts provide
            most = max(num_tokens, trial_update.MAX_TOKENS)
            peak = trial_update.forecast(
                learner, weights, short, tokens, parts=parts, most_tokens=most, most_gb=SAFE * there
            ).gigabytes
        except OutOfMemory as error:
            log.warning("memory: %s", error)
            return MemoryNeed(tokens, there, there, tokens > longest)  # all available memory is the lower bound
        finally:
            _set(learner, own)
            learner.load(self.start)
        return None if peak is None else MemoryNeed(tokens, peak, there, tokens > longest)


def noise_scale(products: "Tensor", num: int) -> NoiseScale:
    """Returns tr(Sigma) / |G|^2 in groups, from [n, n] products: McCandlish et al. 2018 (arXiv:1812.06162), section
    2.2.

    n of `num` groups add c_i to the step's gradient, the others 0. With x_i = num c_i: G = mean x_i, tr(Sigma) = (sum
    |x_i|^2 - num |G|^2) / (num - 1), and |G|^2 - tr(Sigma) / num is unbiased for the true |G|^2. The interval is a
    jackknife over groups, for the signal's share of |G|^2.
    """
    squares, whole = float(products.trace()), float(products.sum())
    rows, own = products.sum(1).tolist(), products.diagonal().tolist()
    left_out = [_signal(squares - own[i], whole - 2 * rows[i] + own[i], num - 1) for i in range(len(own))]
    left_out += [_signal(squares, whole, num - 1)] * (num - len(own))
    mean, signal = sum(left_out) / num, _signal(squares, whole, num)
    half = NORMAL_80 * math.sqrt((num - 1) / num * sum((each - mean) ** 2 for each in left_out))
    low = _groups(signal + half, num)
    return NoiseScale(_groups(signal, num), num if low is None else low, _groups(signal - half, num))


def _signal(squares: float, whole: float, num: int) -> float:
    """Returns the signal's share of |G|^2, from sum |c_i|^2 and |sum c_i|^2; it may be negative by chance."""
    return 1 - (num * squares - whole) / (num - 1) / whole if whole > 0 and num > 1 else 0.0


def _groups(signal: float, num: int) -> float | None:
    """Returns the noise scale for a signal share; None if unbounded."""
    return None if signal <= 0 else num * (1 - min(signal, 1.0)) / min(signal, 1.0)


def _set(learner: "TorchLearner", train: TrainConfig) -> None:
    learner.train_config = learner.optimizer.config = train
