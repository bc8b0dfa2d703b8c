"""Pilots: steps that are taken with other settings and taken back, and the noise of the gradient.

    groups -> for each rate: a whole step -> KL(before || after) -> the checkpoint again
           -> the gradient of each group alone -> NoiseScale

Only for a learner whose weights are in this process. The caller loads the checkpoint after the last one.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from art_cli.config.schema import TrainConfig
from art_cli.learners import trial_update
from art_cli.learners.gradient import Update
from art_cli.learners.policy_step import Pass
from art_cli.learners.samples import Sample
from art_cli.learners.step_samples import PlannedStep, plan_step
from art_cli.learners.step_statistics import StepStatistics
from art_cli.learners.torch_learner import TorchLearner
from art_cli.runs.promise import NORMAL_80, Memory, NoiseScale, Pilot
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError

log = logging.getLogger(__name__)

MAX_ENTRIES = 30_000_000  # numbers of all groups' gradients that are kept; of larger ones every k-th entry
Groups = Sequence[Sequence[ScoredTrajectory]]


class Pilots:
    """The pilots of one learner on the same groups, each from the checkpoint at `start`."""

    def __init__(self, learner: TorchLearner, groups: Groups, start: Path) -> None:
        self.learner, self.groups, self.start = learner, groups, start
        learner.load(start)
        self._plan = self._planned()
        samples = [sample for part in self._plan.parts for sample in part]
        self._before: Update | None = None
        if samples:
            learner.score(samples[0].token_ids.tolist())  # decides whether packs hold
            with learner.runner.running():
                update = learner.gradient.plan(samples, self._plan.finished)
                self._before = learner.gradient.look_ahead(update, StepStatistics(), always=True)

    def _planned(self) -> PlannedStep:
        learner = self.learner
        return plan_step(self.groups, learner.algorithm, loss=learner.loss, train=learner.train_config)

    def take(self, rate: float) -> Pilot:
        """Takes the whole step at that rate, without the warm-up of the rate, and takes it back."""
        learner, own = self.learner, self.learner.train_config
        settings = own.model_copy(update={"learning_rate": rate, "warmup_steps": 0})
        learner.load(self.start)
        begin, kl, clipped = time.perf_counter(), None, math.nan
        try:
            _set(learner, settings)
            metrics = learner.step(self.groups)
            seconds, clipped = time.perf_counter() - begin, metrics.clip_fraction
            if self._before is not None:
                with learner.runner.running():
                    kl = learner.gradient.divergence(self._before)
        except LearnerError as error:
            seconds = time.perf_counter() - begin
            log.warning("pilot at learning rate %g: %s", rate, error)
        finally:
            _set(learner, own)
            learner.load(self.start)
        is_known = kl is not None and math.isfinite(kl)
        return Pilot(rate, kl if is_known else None, None if math.isnan(clipped) else clipped, seconds)

    def noise_scale(self) -> NoiseScale | None:
        """Returns the noise scale in groups of the step, those without signal included; None without a gradient."""
        gradients = list(self._gradients())
        if len(gradients) < 2:
            return None
        num = max(len(self.groups), len(gradients))
        products = torch.stack(gradients) @ torch.stack(gradients).T
        return noise_scale(products.double(), num)

    def _gradients(self) -> Iterator[Tensor]:
        """Yields each group's part of the step's gradient, or every k-th entry of it."""
        learner, whole = self.learner, self._before
        if whole is None:
            return
        size = sum(parameter.numel() for parameter in learner.parameters.values())
        stride = max(1, math.ceil(size * len(self.groups) / MAX_ENTRIES))
        for samples in self._by_group():
            with learner.runner.running():
                update = learner.gradient.plan(samples, self._plan.finished)._replace(counts=whole.counts)
                learner.gradient.accumulate(update, Pass(0, StepStatistics()))
            found = [p.grad.flatten()[::stride].float().cpu() for p in learner.parameters.values() if p.grad is not None]
            for optimizer in learner.optimizers:
                optimizer.clear()
            yield torch.cat(found)

    def _by_group(self) -> list[list[Sample]]:
        """Returns the step's samples by group. Optimizer steps may have changed their weights, as loss.clip_cov does."""
        of_group = {each.id: each.group_id for members in self.groups for each in members}
        found: dict[str, list[Sample]] = {}
        for part in self._plan.parts:
            for sample in part:
                found.setdefault(of_group[sample.trajectory_id], []).append(sample)
        return list(found.values())

    def memory(self, longest: int) -> Memory | None:
        """Returns the peak memory of a step on a row of `longest` tokens, by two measured rows."""
        learner, weights = self.learner, self.learner.weights
        short = min(longest, max(trial_update.MIN_SECOND, trial_update.MAX_TOKENS) // trial_update.GROWTH)
        long = trial_update.second_length(short, max(longest, 2))
        trial_update.step(learner, short, vocabulary=int(weights.model.config.vocab_size))  # has AdamW's state made
        one, two = (trial_update.measure(learner, weights, length) for length in (short, long))
        learner.load(self.start)
        if long <= short:
            whole = two
        else:
            whole = trial_update.estimate(one, two, longest, knee=trial_update.knee_of(weights))
        if whole.gigabytes is None:
            return None
        return Memory(longest, whole.gigabytes, trial_update.memory_there(weights))


def noise_scale(products: Tensor, num: int) -> NoiseScale:
    """Returns tr(Sigma) / |G|^2 in groups, McCandlish et al. 2018 (arXiv:1812.06162), equation 2.11, by [n, n] products.

    Group i adds c_i to the step's gradient of `num` groups; those that are left out add nothing. With x_i = num c_i:
    G = mean x_i, tr(Sigma) = (sum |x_i|^2 - num |G|^2) / (num - 1), and |G|^2 - tr(Sigma) / num is unbiased for the
    true one. The interval is the jackknife's over groups, of the share of |G|^2 that is signal.
    """
    squares, whole = products.diagonal(), products.sum()
    own = _signal(float(squares.sum()), float(whole), num)
    left_out = []
    for index in range(num):
        if index < len(squares):
            without = float(whole - 2 * products[index].sum() + squares[index])
            left_out.append(_signal(float(squares.sum() - squares[index]), without, num - 1))
        else:  # a group without signal adds nothing, and leaving it out only changes the number of groups
            left_out.append(_signal(float(squares.sum()), float(whole), num - 1))
    mean = sum(left_out) / num
    half = NORMAL_80 * math.sqrt((num - 1) / num * sum((each - mean) ** 2 for each in left_out))
    low, high = _groups(min(own + half, 1.0), num), _groups(own - half, num)
    return NoiseScale(_groups(own, num), low if low is not None else float(num), high)


def _signal(squares: float, whole: float, num: int) -> float:
    """Returns the share of |G|^2 that is no noise, from sum |c_i|^2 and |sum c_i|^2; at most 1, and below 0 by chance."""
    if whole <= 0 or num < 2:
        return 0.0
    return 1 - (num * squares - whole) / (num - 1) / whole


def _groups(signal: float, num: int) -> float | None:
    """Returns the noise scale at that share of signal among `num` groups: noise / signal, times `num`."""
    return None if signal <= 0 else num * (1 - signal) / signal


def _set(learner: TorchLearner, train: TrainConfig) -> None:
    learner.train_config = learner.optimizer.config = train
