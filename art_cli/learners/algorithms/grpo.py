"""GRPO and presets that differ from it in clip, ratio, mean or baseline."""

from collections.abc import Sequence

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import (
    advantages,
    leave_one_out,
    over_shrunk_mean,
    overlong_penalty,
    rewards_of,
    seen_turns,
)
from art_cli.learners.algorithms.normalization import UpdateCounts, sample_mean, trajectory_mean, trajectory_sum
from art_cli.learners.algorithms.objectives import (
    Objective,
    PolicyTerms,
    clip_samples,
    clip_sums,
    clip_tokens,
    clip_weights,
)
from art_cli.learners.algorithms.preset import ClippedPreset, ScaledPreset
from art_cli.runs.trajectory import ScoredTrajectory


class Grpo(ScaledPreset[loss_config.GrpoConfig]):
    """GRPO: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), equation 3.

    The mean is over all trained tokens in the step. The paper first averages within each sequence, which favors short
    correct answers and long wrong ones (Dr. GRPO, arXiv:2503.20783, section 3.1).
    """

    def __init__(self, knobs: loss_config.GrpoConfig, max_tokens: int) -> None:
        super().__init__(knobs, max_tokens)
        self.compares_groups = knobs.baseline == "shrunk"

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float | None]]:
        if not self.compares_groups:
            return [self.credit(group) for group in groups]
        return over_shrunk_mean([rewards_of(group) for group in groups])

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)


class DrGrpo(ClippedPreset[loss_config.DrGrpoConfig]):
    """Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.

    GRPO without two biases: advantages are not divided by the group's deviation, and the sum over a trajectory's tokens
    is divided by a constant, so tokens in long and short trajectories count the same.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return advantages(rewards_of(group), scale=False)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return trajectory_sum(num_tokens, update, max_tokens=self.knobs.max_tokens or self.max_tokens)


class Dapo(ScaledPreset[loss_config.DapoConfig]):
    """DAPO: Yu et al. 2025 (arXiv:2503.14476), equations 8 to 13.

    Clip-higher (equation 10), the mean over all tokens (equation 12), and a soft penalty for replies close to the
    length limit (equation 13), which changes rewards before advantages are computed. Its dynamic sampling (equation 11)
    is `rollout.refill`.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        """With overlong=mask, a trajectory cut off by a length limit counts in the group's mean but is not trained."""
        rewards = [reward + self._penalty(each) for reward, each in zip(rewards_of(group), group, strict=True)]
        worth = advantages(rewards, scale=self.knobs.scale_advantages)
        if self.knobs.overlong != "mask":
            return worth
        is_cut_off = [any(turn.finish_reason == "length" for turn in seen_turns(each)) for each in group]
        return [None if cut_off else value for cut_off, value in zip(is_cut_off, worth, strict=True)]

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip_high)

    def _penalty(self, trajectory: ScoredTrajectory) -> float:
        """Returns the soft penalty for the trajectory's longest reply."""
        if self.knobs.overlong != "penalty":
            return 0.0
        longest = max((len(turn.sampled_ids) for turn in seen_turns(trajectory)), default=0)
        return overlong_penalty(longest, max_tokens=self.max_tokens, buffer=self.knobs.overlong_buffer)


class Gspo(ScaledPreset[loss_config.GspoConfig]):
    """GSPO: Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7.

    The ratio covers a whole sequence, so clipping keeps or drops sequences as a whole. A sequence is a sample.
    """

    has_sample_ratio = True

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_samples(terms, self.knobs.clip, self.knobs.clip_high)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return sample_mean(num_tokens, update)


class Cispo(ScaledPreset[loss_config.CispoConfig]):
    """CISPO: MiniMax-M1, 2025 (arXiv:2506.13585), equations 4 and 5.

    The importance weight is clipped, not the update, so every token keeps its gradient.
    """

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_weights(terms, self.knobs.clip, self.knobs.clip_high)


class Rloo(ClippedPreset[loss_config.RlooConfig]):
    """RLOO: Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740), section 3.3.

    A trajectory's baseline is the mean reward of the group's other trajectories, and a whole trajectory is one action:
    the gradient at ratio 1 is the mean over trajectories of -A_i times the sum of grad log p over the tokens. The
    per-sample ratio and clip are TRL's; the paper has neither, and with one optimizer step per policy step the ratio is
    1. The mean covers all sampled trajectories, including groups without signal: `loss.mean_over=all`. `loss.kl` and
    the other per-token components use a mean over a sample's tokens; the paper's KL, part of the reward, is a sum.
    """

    has_sample_ratio = True

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return leave_one_out(rewards_of(group))

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_sums(terms, self.knobs.clip, self.knobs.clip)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return trajectory_mean(num_tokens, update)
