"""Presets that differ from GRPO in what a reward is compared with: MaxRL, RLOO, REINFORCE++, GDPO."""

import math
from collections.abc import Sequence

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import (
    advantages,
    leave_one_out,
    over_mean,
    rewards_of,
    scale_over_step,
    weighted_sum,
)
from art_cli.learners.algorithms.normalization import UpdateCounts, trajectory_mean
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms, clip_sums
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError


class Maxrl(ClippedPreset[loss_config.MaxrlConfig]):
    """MaxRL: Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning (arXiv:2602.02710).

    A_i = (r_i - mean(r)) / mean(r), and 0 where the mean is 0. For rewards of 0 and 1 its gradient is an unbiased
    estimate of a lower order of the gradient of log p, with p the probability of success; RL's is that of p. So a
    scenario counts the more the seldomer it is solved. The paper's rewards are 0 and 1; here any of at least 0.

    The estimate is a mean over all scenarios, those never solved too: `loss.mean_over=all`. It adds up the tokens of an
    attempt; here the sum over all attempts is divided by the number of their tokens, as GRPO's.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        rewards = rewards_of(group)
        for trajectory, reward in zip(group, rewards, strict=True):
            if reward < 0:
                raise LearnerError(
                    f"trajectory {trajectory.id}: its reward is {reward:g}; loss 'maxrl' divides by the mean reward of "
                    "a group and takes no negative ones: add a constant to the rewards, or choose another loss"
                )
        return over_mean(rewards)


class Rloo(ClippedPreset[loss_config.RlooConfig]):
    """RLOO: Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740), section 3.3.

    The baseline of a trajectory is the mean reward of the others in its group, and a whole trajectory is one action:
    the gradient at ratio 1 is the mean over trajectories of -A_i times the sum of grad log p over its tokens. The
    ratio of a sample and its clip are TRL's; the paper has neither, and with one optimizer step per step both are 1.
    That mean is over all sampled trajectories, those of groups without signal too: `loss.mean_over=all`.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return leave_one_out(rewards_of(group))

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_sums(terms, self.knobs.clip, self.knobs.clip)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return trajectory_mean(num_tokens, update)


class ReinforcePlusPlus(ClippedPreset[loss_config.ReinforcePlusPlusConfig]):
    """REINFORCE++: Hu et al. 2025 (arXiv:2501.03262), and with `baseline` its variant REINFORCE++ w/ baseline.

    A_i = (r_i - mean) / std over all trajectories of the step; with `baseline` r_i minus the mean of its group, divided
    by the standard deviation of these differences over the step. Two deviations from the paper: a trajectory counts
    once in the step's mean and deviation, not once per token, and the KL is a component of the loss (`loss.kl`, k3),
    not a part of the reward.
    """

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float | None]]:
        rewards = [rewards_of(group) for group in groups]
        if self.knobs.baseline:
            return scale_over_step([advantages(of_group, scale=False) for of_group in rewards])
        return scale_over_step(rewards)


class Gdpo(ClippedPreset[loss_config.GdpoConfig]):
    """GDPO: Liu et al. 2026, Group reward-Decoupled Normalization (arXiv:2601.05242), section 3.

    Each part of the reward is normalized within its group on its own, A_k = (r_k - mean(r_k)) / std(r_k). The weighted
    sum over the parts is divided by its standard deviation over the step. Its mean over the step is 0 already, because
    that of every group is. So a part counts by its weight, whatever its unit and however seldom it differs.
    """

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float | None]]:
        return scale_over_step([self._sum_of_parts(group) for group in groups])

    def _sum_of_parts(self, group: Sequence[ScoredTrajectory]) -> list[float]:
        """[G] the weighted sum of the parts, each normalized within the group."""
        weights = self.knobs.reward_parts
        parts = [advantages([_part(trajectory, name) for trajectory in group], scale=True) for name in weights]
        return weighted_sum(parts, list(weights.values()))


def _part(trajectory: ScoredTrajectory, name: str) -> float:
    """A part of the trajectory's reward: the metric of that name, or the reward itself as `reward`."""
    value = trajectory.reward if name == "reward" else trajectory.metrics.get(name)
    if value is None:
        there_are = ", ".join(map(repr, trajectory.metrics)) or "none"
        raise LearnerError(
            f"trajectory {trajectory.id}: no metric {name!r}, which loss.reward_parts names; it has: {there_are}. "
            "The rollout returns them as Outcome(metrics=...)"
        )
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise LearnerError(f"trajectory {trajectory.id}: its metric {name!r} is {value:g}, which cannot be a reward")
    return value
