"""PlannedStep: the samples of a policy step, divided into its optimizer steps, without what is held back."""

from collections.abc import Sequence
from typing import NamedTuple

from art_cli.config.schema import AlgorithmConfig, LossConfig, TrainConfig
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.covariance import near_covariant, without_covariant
from art_cli.learners.algorithms.normalization import FinishedCounts
from art_cli.learners.samples import Sample
from art_cli.learners.step_samples import StepSamples, make_step_samples, split_by_update
from art_cli.learners.training_record import StepRecord
from art_cli.runs.trajectory import ScoredTrajectory


class PlannedStep(NamedTuple):
    """What a step trains on."""

    batch: StepSamples
    parts: list[list[Sample]]  # the samples of each optimizer step
    finished: FinishedCounts  # one optimizer step's part of what the step's finished trajectories hold


def plan_step(
    groups: Sequence[Sequence[ScoredTrajectory]],
    algorithm: Algorithm,
    *,
    loss: LossConfig | AlgorithmConfig,
    train: TrainConfig,
    record: StepRecord | None = None,
) -> PlannedStep:
    """The plan of a step on these groups. `record` notes which tokens are masked."""
    batch = make_step_samples(groups, algorithm, kl=loss.kl, echo=loss.echo)
    parts = split_by_update(batch.groups, train.updates_per_step)
    if loss.clip_cov is not None:
        clipped = [without_covariant(part, loss.clip_cov) for part in parts]
        if record is not None:
            for before, after in zip(parts, clipped, strict=True):
                record.note_zeroed("clip_cov", before, after)
        parts = clipped
    if loss.kl_cov is not None:
        parts = [near_covariant(part, loss.kl_cov, loss.kl_cov_weight) for part in parts]
    # a step of few groups with signal takes fewer updates, and each is as large as if all groups had signal
    return PlannedStep(batch, parts, batch.finished.divided(max(1, min(train.updates_per_step, batch.num_groups))))
