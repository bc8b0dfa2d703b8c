"""MaxRL, an experiment: rewards are divided by their group's mean."""

from collections.abc import Sequence
from typing import Literal

from art_cli.config.sections.loss_config import ClippedLossConfig
from art_cli.learners.algorithms.credit import over_mean, rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError


class MaxrlConfig(ClippedLossConfig):
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): advantages are divided by the group's mean reward, so rarely solved
    scenarios count more. For rewards from 0 upward."""

    name: Literal["maxrl"]


class Maxrl(ClippedPreset[MaxrlConfig]):
    """MaxRL: Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning (arXiv:2602.02710).

    A_i = (r_i - mean(r)) / mean(r), and 0 for mean 0. For rewards of 0 and 1 the gradient is an unbiased estimate of a
    truncated expansion of grad log p, with p the success probability; RL estimates grad p. Scenarios that are rarely
    solved therefore count more. The paper's rewards are 0 and 1; here any non-negative reward is allowed.

    The estimate averages over all scenarios, including those never solved: `loss.mean_over=all`. The paper adds up an
    attempt's tokens; here the sum over all attempts is divided by their token count, as in GRPO.
    """

    section = MaxrlConfig

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        rewards = rewards_of(group)
        for trajectory, reward in zip(group, rewards, strict=True):
            if reward < 0:
                raise LearnerError(
                    f"trajectory {trajectory.id}: loss 'maxrl' needs rewards of at least 0, not {reward:g}: add a "
                    f"constant to the rewards and remove step_{trajectory.step:04d} of the run, or choose another loss"
                )
        return over_mean(rewards)
