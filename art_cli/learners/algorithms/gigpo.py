"""GiGPO, an experiment: the attempt's advantage, plus the reply's advantage among replies to equal states."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from art_cli.config.sections.base_config import NonNegative, UnitInterval
from art_cli.config.sections.loss_config import ClippedLossConfig, ScaledLossConfig
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.algorithms.step_credit import episodes_of, step_advantages, turn_credit
from art_cli.learners.samples import Credit
from art_cli.runs.trajectory import ScoredTrajectory, has_signal


class GigpoConfig(ScaledLossConfig, ClippedLossConfig):
    """GiGPO (Feng et al. 2025, arXiv:2505.10978): GRPO, and each reply against others in equal states."""

    compares_states: ClassVar[bool] = True

    name: Literal["gigpo"]
    step_weight: NonNegative = 1.0
    """The weight of the advantage within equal states, added to the whole attempt's. 0: GRPO."""
    gamma: UnitInterval = 0.95
    """Discount per turn: with k turns still to come, a reply's return is gamma^k times the reward."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "gamma" in self.model_fields_set and self.step_weight == 0:
            yield "gamma", "used within equal states only, and loss.step_weight is 0"


class Gigpo(ClippedPreset[GigpoConfig]):
    """GiGPO: Feng et al. 2025, Group-in-Group Policy Optimization (arXiv:2505.10978), equations 3 to 9.

    A = A^E + omega A^S (equation 8): the attempt's advantage in its group, plus the reply's advantage among the group's
    replies to the same state (step_credit.py). The ratio is per token, as in the authors' code; the paper's covers the
    whole reply. A group with equal rewards has no signal, even if its attempts took different numbers of turns.
    """

    section = GigpoConfig

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        rewards, scale = rewards_of(group), self.knobs.scale_advantages
        if not has_signal(rewards):
            return [0.0] * len(group)
        steps = step_advantages(episodes_of(group, gamma=self.knobs.gamma), scale=scale)
        return [
            turn_credit(each, [whole + self.knobs.step_weight * step for step in own])
            for each, whole, own in zip(group, advantages(rewards, scale=scale), steps, strict=True)
        ]
