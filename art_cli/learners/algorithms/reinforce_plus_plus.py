"""REINFORCE++, an experiment: rewards are normalized over the whole step."""

from collections.abc import Sequence
from typing import Literal

from art_cli.config.sections.loss_config import ClippedLossConfig
from art_cli.learners.algorithms.credit import advantages, rewards_of, scale_over_step
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.runs.trajectory import ScoredTrajectory


class ReinforcePlusPlusConfig(ClippedLossConfig):
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): rewards are normalized over all trajectories in the step."""

    name: Literal["reinforce++"]
    baseline: bool = False
    """true: the group's mean is subtracted before (REINFORCE++ w/ baseline)."""

    @property
    def compares_rewards_alone(self) -> bool:
        return self.baseline


class ReinforcePlusPlus(ClippedPreset[ReinforcePlusPlusConfig]):
    """REINFORCE++: Hu et al. 2025 (arXiv:2501.03262); `baseline` selects its variant REINFORCE++ w/ baseline.

    A_i = (r_i - mean) / std over all trajectories in the step. With `baseline`, the group's mean is subtracted from r_i
    and the difference is divided by the standard deviation of all differences in the step. Two deviations from the
    paper: a trajectory counts once, not once per token, in the step's mean and deviation; and the KL is a loss
    component (`loss.kl`, k3) instead of part of the reward.
    """

    section = ReinforcePlusPlusConfig

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float | None]]:
        rewards = [rewards_of(group) for group in groups]
        if self.knobs.baseline:
            return scale_over_step([advantages(of_group, scale=False) for of_group in rewards])
        return scale_over_step(rewards)
