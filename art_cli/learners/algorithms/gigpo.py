"""Presets with an advantage for each reply, by comparing those to equal states: GiGPO, GAGPO."""

from collections.abc import Sequence

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.algorithms.step_credit import (
    episodes_of,
    grouped_gae,
    normalized,
    step_advantages,
    turn_credit,
)
from art_cli.learners.token_weights import Credit
from art_cli.runs.trajectory import ScoredTrajectory, has_signal


class Gigpo(ClippedPreset[loss_config.GigpoConfig]):
    """GiGPO: Feng et al. 2025, Group-in-Group Policy Optimization (arXiv:2505.10978), equations 3 to 9.

    A = A^E + omega A^S (equation 8): the attempt's advantage in its group, and the reply's among those of the group's
    replies that answered the same state (step_credit.py). The ratio is each token's, as in the authors' code; the
    paper's is the whole reply's. A group with equal rewards has no signal, though its attempts may have taken more or
    fewer turns.
    """

    compares_states = True

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        rewards, scale = rewards_of(group), self.knobs.scale_advantages
        if not has_signal(rewards):
            return [0.0] * len(group)
        steps = step_advantages(episodes_of(group, gamma=self.knobs.gamma), scale=scale)
        return [
            turn_credit(each, [whole + self.knobs.step_weight * step for step in own])
            for each, whole, own in zip(group, advantages(rewards, scale=scale), steps, strict=True)
        ]


class Gagpo(ClippedPreset[loss_config.GagpoConfig]):
    """GAGPO: Zhu et al. 2026 (arXiv:2605.13217). The advantages of `grouped_gae` (step_credit.py), and nothing else.

    They are normalized over all steps of the group: minus the mean, divided by the standard deviation. The ratio is
    each token's; the paper's is the geometric mean over a reply. A group with equal rewards has no signal.
    """

    compares_states = True

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        if not has_signal(rewards_of(group)):
            return [0.0] * len(group)
        episodes = episodes_of(group, gamma=self.knobs.gamma)
        worth = grouped_gae(episodes, gamma=self.knobs.gamma, gae_lambda=self.knobs.gae_lambda)
        if self.knobs.scale_advantages:
            worth = normalized(worth, episodes)
        return [turn_credit(each, own) for each, own in zip(group, worth, strict=True)]
