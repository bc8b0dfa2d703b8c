"""Algorithms that benchmarks/learning/reach.py tries against the default, written as a user writes one.

python -m benchmarks.learning.reach --only parcels --seeds 0 --sides "risk 8x2"
"""

import math
from collections.abc import Sequence

from art_cli.learners.algorithms import Algorithm, Objective
from art_cli.learners.algorithms.credit import over_shrunk_mean, rewards_of
from art_cli.learners.algorithms.normalization import UpdateCounts, trajectory_mean
from art_cli.learners.algorithms.objectives import PolicyTerms, clip_tokens, sample_sum
from art_cli.runs.trajectory import ScoredTrajectory, has_signal


class RiskSeeking(Algorithm):
    """GRPO with the default's baseline, over exp(beta r): a step from 0.75 to 1 counts more than one from 0 to 0.25.

    The utility of arXiv:2509.24261 for rewards from 0 to 1, scaled so that 0 stays 0 and 1 stays 1. With beta = 3, a
    reward of 0.25 counts 0.06.
    """

    is_scaled, compares_groups = False, True

    def __init__(self, beta: float = 3.0, clip: float = 0.2) -> None:
        self.beta, self.clip = beta, clip

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[float]]:
        return over_shrunk_mean([[self._utility(reward) for reward in rewards_of(group)] for group in groups])

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.clip, self.clip)

    def _utility(self, reward: float) -> float:
        return math.expm1(self.beta * reward) / math.expm1(self.beta)


class Oapl(Algorithm):
    """OAPL (arXiv:2602.19362): sum over attempts of (beta2 log(pi / pi_old) - (r - V))^2, no ratio and no clip.

    V = beta1 log mean exp(r / beta1) over the group. An attempt is at rest once its logprob has changed by
    (r - V) / beta2.
    """

    is_scaled = False

    def __init__(self, beta1: float = 1.0, beta2: float = 0.1) -> None:
        self.beta1, self.beta2 = beta1, beta2

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float]:
        rewards = rewards_of(group)
        if not has_signal(rewards):
            return [0.0] * len(rewards)
        value = self.beta1 * math.log(math.fsum(math.exp(r / self.beta1) for r in rewards) / len(rewards))
        return [reward - value for reward in rewards]

    def objective(self, terms: PolicyTerms) -> Objective:
        moved = sample_sum(terms.new - terms.old, terms.samples)
        return Objective((self.beta2 * moved - terms.advantages).square())

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        return trajectory_mean(num_tokens, update)
