"""RemoteStepNumbers: what a step on a server of the Tinker protocol reports, computed from the logprobs of its answers.

The same numbers as the torch learner's, except those that need more than logprobs: entropy, and how tokens were packed.
"""

import math
from collections.abc import Sequence

import numpy as np

from art_cli.learners import StepMetrics
from art_cli.learners.samples import Sample
from art_cli.learners.step_samples import StepSamples
from art_cli.learners.token_weights import CROSS_ENTROPY, Floats
from art_cli.learners.training_record import StepRecord
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.tinker.tinker_losses import ServerLoss, WeightedSample


class RemoteStepNumbers:
    """The numbers of one step, which are added update by update."""

    def __init__(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        newest = max((trajectory.step for group in groups for trajectory in group), default=0)
        self._replayed = {each.id for group in groups for each in group if each.step < newest}
        self.norms: list[tuple[float, float]] = []  # gradient norms of each optimizer step, before and after the clip
        self._samples: list[Sample] = []
        self._losses: list[float] = []
        self._clipped: list[Floats] = []
        self._imitated: list[Floats] = []
        self._gaps: list[Floats] = []

    def add_counts(self, samples: Sequence[Sample]) -> None:
        self._samples += samples

    def add_gap(self, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> None:
        """Adds the distances between the learner's logprobs and the engine's at the weights that sampled."""
        for sample, new in zip(samples, logprobs, strict=True):
            if sample.trajectory_id not in self._replayed:
                engine = np.where(np.isnan(sample.logprobs), sample.raw_logprobs, sample.logprobs)
                gaps = np.abs(engine - new)
                self._gaps.append(gaps[~np.isnan(gaps)])

    def add_update(
        self,
        update: Sequence[WeightedSample],
        logprobs: Sequence[Floats],
        loss: ServerLoss,
        record: StepRecord | None,
        number: int | None,
    ) -> None:
        """Adds an optimizer step's losses. `number`: its place in the first epoch; None: it is of a later one."""
        total = 0.0
        for each, new in zip(update, logprobs, strict=True):
            inside, is_imitated, lost = each.in_policy, ~np.isnan(each.imitation), 0.0
            if inside.any():
                found = loss.values(new[inside], each.old[inside], each.advantages[inside])
                lost += math.fsum(found.values)
                self._clipped.append(found.is_clipped)
            if is_imitated.any():
                lost -= math.fsum(each.imitation[is_imitated] * new[is_imitated])
                self._imitated.append(-new[is_imitated])
            total += lost
            if record is not None and number is not None:
                record.note_learned(each.sample, new, loss=lost, update=number)
        self._losses.append(total)

    @property
    def gap(self) -> float:
        return _mean(self._gaps)

    @property
    def gap_max(self) -> float:
        return max((float(part.max()) for part in self._gaps if len(part)), default=math.nan)

    def metrics(self, batch: StepSamples, *, learning_rate: float, train_s: float) -> StepMetrics:
        samples, num = self._samples, len(self.norms)
        num_flat = sum(len(sample.token_ids) for sample in samples)
        return StepMetrics(
            **batch.reported(),
            num_samples=len(samples),
            num_updates=num,
            tokens_trained=sum(len(sample.targets) for sample in samples),
            tokens_imitated=sum(sample.num_in(CROSS_ENTROPY) for sample in samples),
            tokens_flat=num_flat,
            tokens_computed=num_flat,
            loss=math.fsum(self._losses) / num if num else math.nan,
            cross_entropy=_mean(self._imitated),
            clip_fraction=_mean(self._clipped),
            grad_norm=math.fsum(norm for norm, _ in self.norms) / num if num else math.nan,
            grad_clip=math.fsum(norm for _, norm in self.norms) / num if num else math.nan,
            learning_rate=learning_rate if num else math.nan,
            logprob_gap=self.gap,
            logprob_gap_max=self.gap_max,
            train_s=train_s,
        )


def _mean(parts: Sequence[Floats]) -> float:
    num = sum(map(len, parts))
    return float(sum(float(part.sum()) for part in parts)) / num if num else math.nan
