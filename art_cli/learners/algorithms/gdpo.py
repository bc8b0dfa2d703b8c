"""GDPO, an experiment: a reward in several parts, each normalized within its group."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from pydantic import Field

from art_cli.config.sections.base_config import Float
from art_cli.config.sections.loss_config import ClippedLossConfig
from art_cli.learners.algorithms.credit import advantages, scale_over_step, weighted_sum
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError


class GdpoConfig(ClippedLossConfig):
    """GDPO (Liu et al. 2026, arXiv:2601.05242): a reward in parts, each normalized within its group."""

    name: Literal["gdpo"]
    reward_parts: dict[str, Float] = Field(min_length=1)
    """Each part's weight: {win: 1.0, brevity: 0.2}. A name is a rollout metric, or `reward` (the rollout's or judge's
    reward), which only counts if it is named."""

    @property
    def compares_rewards_alone(self) -> bool:
        return False

    @property
    def parts(self) -> Collection[str]:
        return self.reward_parts.keys()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        for name, weight in self.reward_parts.items():
            if weight == 0:
                yield f"reward_parts.{name}", "a part of weight 0 has no effect; remove it"


class Gdpo(ClippedPreset[GdpoConfig]):
    """GDPO: Liu et al. 2026, Group reward-Decoupled Normalization (arXiv:2601.05242), section 3.

    Every reward part is normalized separately within its group, A_k = (r_k - mean(r_k)) / std(r_k). The weighted sum
    over parts is divided by its standard deviation over the step; its mean over the step is already 0, because every
    group's mean is 0. So a part counts by weight, independent of unit and of how often it differs.
    """

    section = GdpoConfig

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float | None]]:
        weights, sums = self.knobs.reward_parts, []
        for group in groups:
            parts = [advantages([_part(trajectory, name) for trajectory in group], scale=True) for name in weights]
            sums.append(weighted_sum(parts, list(weights.values())))
        return scale_over_step(sums)


def _part(trajectory: ScoredTrajectory, name: str) -> float:
    """Returns one reward part: the metric with this name, or the reward itself for `reward`."""
    value = trajectory.reward if name == "reward" else trajectory.reported(name)
    if value is None:
        there_are = ", ".join(map(repr, trajectory.metrics)) or "none"
        raise LearnerError(
            f"trajectory {trajectory.id}: no metric {name!r}, which loss.reward_parts names; it has: {there_are}. "
            "The rollout returns them as Outcome(metrics=...)"
        )
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise LearnerError(f"trajectory {trajectory.id}: its metric {name!r} is {value:g}, which cannot be a reward")
    return value
