"""The algorithms that a configuration chooses by name (`loss=dapo`), one class each, with paper and equation.

A new one is a class here, a line in PRESETS, and its knobs in config/sections/loss.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from art_cli.config.sections import loss
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.credit import advantages, overlong_penalty, rewards_of, seen_turns
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms, clip_samples, clip_tokens, clip_weights
from art_cli.learners.algorithms.shares import UpdateCounts, sample_mean, trajectory_sum
from art_cli.learners.algorithms.step_credit import (
    episodes_of,
    grouped_gae,
    normalized,
    step_advantages,
    turn_credit,
)
from art_cli.learners.algorithms.user import UserAlgorithm
from art_cli.learners.token_weights import Credit
from art_cli.trajectory import ScoredTrajectory, has_signal

Knobs = TypeVar("Knobs", bound=loss.BaseLossConfig)
ScaledKnobs = TypeVar("ScaledKnobs", bound=loss.ScaledLossConfig)


class Preset(Algorithm, Generic[Knobs]):
    """An algorithm with the knobs of its section. `max_tokens` is the length limit of one reply."""

    def __init__(self, knobs: Knobs, max_tokens: int) -> None:
        self.knobs, self.max_tokens = knobs, max_tokens


class ScaledPreset(Preset[ScaledKnobs]):
    """A preset that may divide its advantages by the group's standard deviation."""

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return advantages(rewards_of(group), scale=self.knobs.scale_advantages)


class Grpo(ScaledPreset[loss.GrpoConfig]):
    """GRPO: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), equation 3.

    The mean is over all trained tokens of the step. The paper's is over each sequence first, which favours short right
    answers and long wrong ones (Dr. GRPO, arXiv:2503.20783, section 3.1).
    """

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)


class DrGrpo(Preset[loss.DrGrpoConfig]):
    """Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2.

    GRPO without its two biases: advantages are not divided by the group's deviation, and the sum over a trajectory's
    tokens is divided by a constant, so that a token counts the same in a long and a short one.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return advantages(rewards_of(group), scale=False)

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return trajectory_sum(num_tokens, update, max_tokens=self.knobs.max_tokens or self.max_tokens)


class Dapo(ScaledPreset[loss.DapoConfig]):
    """DAPO: Yu et al. 2025 (arXiv:2503.14476), equations 8 to 13.

    Clip-higher (equation 10), the mean over all tokens (equation 12), and a soft punishment of replies that come near
    the length limit (equation 13), which changes rewards and so comes before advantages. Its dynamic sampling
    (equation 11) is `rollout.refill`.
    """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        """With overlong=mask, a trajectory that a length limit cut off counts in the group's mean and is left out."""
        rewards = [reward + self._penalty(each) for reward, each in zip(rewards_of(group), group, strict=True)]
        worth = advantages(rewards, scale=self.knobs.scale_advantages)
        if self.knobs.overlong != "mask":
            return worth
        return [None if _is_cut_off(each) else value for each, value in zip(group, worth, strict=True)]

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip_high)

    def _penalty(self, trajectory: ScoredTrajectory) -> float:
        """The soft punishment of the trajectory's longest reply."""
        if self.knobs.overlong != "penalty":
            return 0.0
        longest = max((len(turn.sampled_ids) for turn in seen_turns(trajectory)), default=0)
        return overlong_penalty(longest, max_tokens=self.max_tokens, buffer=self.knobs.overlong_buffer)


class Gspo(ScaledPreset[loss.GspoConfig]):
    """GSPO: Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7.

    The ratio belongs to a whole sequence, so that clipping takes or leaves a sequence whole. A sequence is a sample.
    """

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_samples(terms, self.knobs.clip, self.knobs.clip_high)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return sample_mean(num_tokens, update)


class Cispo(ScaledPreset[loss.CispoConfig]):
    """CISPO: MiniMax-M1, 2025 (arXiv:2506.13585), equations 4 and 5.

    The importance weight is clipped, not the update: every token keeps its gradient.
    """

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_weights(terms, self.knobs.clip, self.knobs.clip_high)


class Gigpo(Preset[loss.GigpoConfig]):
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

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)


class Gagpo(Preset[loss.GagpoConfig]):
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

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)


PRESETS: dict[str, type[Preset[Any]]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "gigpo": Gigpo,
    "gagpo": Gagpo,
}


def build_algorithm(
    config: loss.LossConfig | loss.AlgorithmConfig, *, max_tokens: int, directory: Path = Path()
) -> Algorithm:
    """The algorithm that a configuration names. `max_tokens` is the length limit of one reply.

    Raises UsageError: a user's class, relative to `directory`, that cannot be loaded.
    """
    if isinstance(config, loss.AlgorithmConfig):
        return UserAlgorithm(config.entry, config.options, directory)
    return PRESETS[config.name](config, max_tokens)


def _is_cut_off(trajectory: ScoredTrajectory) -> bool:
    return any(turn.finish_reason == "length" for turn in seen_turns(trajectory))
