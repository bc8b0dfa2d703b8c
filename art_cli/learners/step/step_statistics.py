"""StepStatistics: a step's counts and means, accumulated pack by pack. Importing it does not import torch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from art_cli.learners import StepMetrics
from art_cli.learners.samples import Floats, Row, Sample, mask_of
from art_cli.learners.step.step_samples import StepSamples
from art_cli.models.device import doubled

if TYPE_CHECKING:
    from torch import Tensor

    from art_cli.learners.algorithms.pack_loss import PackLoss
    from art_cli.learners.packs.logprobs import TokenScores
    from art_cli.learners.packs.packing import Pack, Terms


# fields of StepStatistics that are added up, and fields that are averaged, under their StepMetrics names
COUNTS = ("num_samples", "tokens_trained", "tokens_imitated", "tokens_flat", "tokens_computed")
MEANS = (
    *("cross_entropy", "kl", "entropy", "clip_fraction", "logprob_change", "off_policy_masked"),
    *("logprob_gap", "value_loss"),
)


class _Mean(msgspec.Struct):
    """A running mean; NaN without values."""

    sum: float = 0.0
    count: int = 0
    max: float = math.nan

    def add(self, values: "Tensor | Floats") -> None:
        if len(values):
            self.sum += float(values.sum() if isinstance(values, np.ndarray) else doubled(values).sum())
            self.count += len(values)
            largest = float(values.max())
            self.max = largest if math.isnan(self.max) else max(self.max, largest)

    def join(self, other: "_Mean") -> None:
        """Adds the values of `other`."""
        if other.count:
            self.sum += other.sum
            self.max = max(self.max, other.max) if self.count else other.max
            self.count += other.count

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan


class StepStatistics(msgspec.Struct):
    """Counts and means for one step, over its packs and optimizer steps."""

    # ids of trajectories sampled by older policies; their gap does not indicate drift
    older: frozenset[str] = frozenset()
    num_samples: int = 0
    tokens_flat: int = 0
    tokens_computed: int = 0
    tokens_trained: int = 0
    tokens_imitated: int = 0
    losses: list[float] = []  # each optimizer step's loss, summed over packs
    grad_norms: list[float] = []  # each optimizer step's gradient norm before clipping
    grad_clips: list[float] = []  # the same after clipping
    update_kl: float = math.nan  # policy KL of the last optimizer step; NaN: not measured
    update_share: float = math.nan  # share of the last optimizer step that was kept; NaN: not measured
    cross_entropy: _Mean = msgspec.field(default_factory=_Mean)
    kl: _Mean = msgspec.field(default_factory=_Mean)
    entropy: _Mean = msgspec.field(default_factory=_Mean)
    clip_fraction: _Mean = msgspec.field(default_factory=_Mean)
    logprob_change: _Mean = msgspec.field(default_factory=_Mean)
    off_policy_masked: _Mean = msgspec.field(default_factory=_Mean)
    logprob_gap: _Mean = msgspec.field(default_factory=_Mean)
    value_loss: _Mean = msgspec.field(default_factory=_Mean)

    @classmethod
    def total(cls, parts: Sequence["StepStatistics"]) -> "StepStatistics":
        """Combines the statistics of all processes that shared these packs."""
        total = cls()
        total.losses = [sum(losses) for losses in zip(*(part.losses for part in parts), strict=True)]
        # equal in all processes, because gradients are summed across processes
        total.grad_norms, total.grad_clips = parts[0].grad_norms, parts[0].grad_clips
        total.update_kl, total.update_share = parts[0].update_kl, parts[0].update_share
        for part in parts:
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in MEANS:
                getattr(total, name).join(getattr(part, name))
        return total

    def add_counts(self, samples: Sequence[Sample], *, num_computed: int) -> None:
        """Counts samples and tokens, once for all epochs; `num_computed` is the number of tokens run."""
        self.num_samples += len(samples)
        self.tokens_trained += sum(len(sample.targets) for sample in samples)
        self.tokens_imitated += sum(sample.num_in(Row.CROSS_ENTROPY) for sample in samples)
        self.tokens_flat += sum(len(sample.token_ids) for sample in samples)
        self.tokens_computed += num_computed

    def add_gap(self, scores: "TokenScores", pack: "Pack") -> None:
        """Adds the differences between learner and engine logprobs. Call it while the sampling weights are in place."""
        terms, is_old = pack.terms, np.array([sample.trajectory_id in self.older for sample in pack.samples])
        if is_old.any():
            hidden = np.where(is_old[terms.samples], np.nan, 0.0)
            terms = terms._replace(logprobs=terms.logprobs + hidden, raw_logprobs=terms.raw_logprobs + hidden)
        self.logprob_gap.add(logprob_gaps(scores, terms))

    def add_pack(
        self, pack: "Pack", scores: "TokenScores", loss: "PackLoss", *, importance: "Tensor | None" = None
    ) -> None:
        """Adds a pack's numbers. `importance` is [N] the off-policy weights of its terms."""
        import torch

        in_policy = mask_of(pack.terms.weights, Row.POLICY)
        sampled = pack.terms.edges[in_policy]
        self.losses[-1] += float(loss.loss.detach())
        self.entropy.add(scores.entropies.detach()[torch.from_numpy(sampled).to(scores.entropies.device)])
        imitated = pack.terms.edges[mask_of(pack.terms.weights, Row.CROSS_ENTROPY)]
        self.cross_entropy.add(-scores.logprobs.detach()[torch.from_numpy(imitated).to(scores.logprobs.device)])
        if loss.is_clipped is not None:
            self.clip_fraction.add(loss.is_clipped)
        if importance is not None:
            self.off_policy_masked.add(importance[torch.from_numpy(in_policy).to(importance.device)] == 0)
        if loss.kl is not None:
            self.kl.add(loss.kl)
        if loss.value_errors is not None:
            self.value_loss.add(loss.value_errors)

    def metrics(self, batch: StepSamples, *, learning_rate: float, train_s: float) -> StepMetrics:
        """Returns the step's metrics that all learners share."""
        return StepMetrics(
            **batch.reported(),
            **{name: getattr(self, name) for name in COUNTS},
            **{name: getattr(self, name).mean for name in MEANS},
            num_updates=len(self.grad_norms),
            loss=_mean_of(self.losses),
            grad_norm=_mean_of(self.grad_norms),
            grad_clip=_mean_of(self.grad_clips),
            learning_rate=learning_rate if self.grad_norms else math.nan,
            update_kl=self.update_kl,
            update_share=self.update_share,
            logprob_gap_max=self.logprob_gap.max,
            train_s=train_s,
        )


def _mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def logprob_gaps(scores: "TokenScores", terms: "Terms") -> "Tensor":
    """Returns |engine - learner| in nats where they compare: raw logprobs for truncated sampling, none if unknown."""
    import torch

    learner, raw_learner = doubled(scores.logprobs.detach()), doubled(scores.raw_logprobs.detach())
    arrays = (terms.edges, terms.logprobs, terms.raw_logprobs)
    edges, engine, raw = (torch.from_numpy(array).to(learner.device) for array in arrays)
    gaps = torch.where(engine.isnan(), raw - raw_learner[edges], engine - learner[edges]).abs()
    return gaps[~gaps.isnan()]
