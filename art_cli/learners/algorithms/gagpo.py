"""GAGPO, an experiment: one advantage per turn, from the group's mean returns in equal states."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from art_cli.config.sections.base_config import UnitInterval
from art_cli.config.sections.loss_config import ClippedLossConfig, ScaledLossConfig
from art_cli.learners.algorithms.credit import rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.algorithms.step_credit import episodes_of, grouped_gae, normalized, turn_credit
from art_cli.learners.samples import Credit
from art_cli.runs.trajectory import ScoredTrajectory, has_signal


class GagpoConfig(ScaledLossConfig, ClippedLossConfig):
    """GAGPO (Zhu et al. 2026, arXiv:2605.13217): GAE over turns; a state's value is the group's mean return there."""

    compares_states: ClassVar[bool] = True

    name: Literal["gagpo"]
    gamma: UnitInterval = 0.95
    """Discount per turn: with k turns still to come, a reply's return is gamma^k times the reward."""
    gae_lambda: UnitInterval = 0.95
    """How far a change of value reaches back. 0: only to the reply before; 1: to all."""


class Gagpo(ClippedPreset[GagpoConfig]):
    """GAGPO: Zhu et al. 2026 (arXiv:2605.13217), using only the advantages of `grouped_gae` (step_credit.py).

    Advantages are normalized over all steps in the group: minus the mean, divided by the standard deviation. The ratio
    is per token; the paper's is the geometric mean over a reply. A group with equal rewards has no signal.
    """

    section = GagpoConfig

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        if not has_signal(rewards_of(group)):
            return [0.0] * len(group)
        episodes = episodes_of(group, gamma=self.knobs.gamma)
        worth = grouped_gae(episodes, gamma=self.knobs.gamma, gae_lambda=self.knobs.gae_lambda)
        if self.knobs.scale_advantages:
            worth = normalized(worth, episodes)
        return [turn_credit(each, own) for each, own in zip(group, worth, strict=True)]
