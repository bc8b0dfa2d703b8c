"""PPO: a critic gives each turn its advantage (gae.py). The learner owns the critic (../critic.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.gae import credit_by_values, critic_numbers, turn_values
from art_cli.learners.algorithms.normalization import UpdateCounts
from art_cli.learners.algorithms.objectives import ValueTerms, clipped_value_error
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.token_weights import Credit
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from torch import Tensor

    from art_cli.learners.packs.logprob_reader import Reader


class Ppo(ClippedPreset[loss_config.PpoConfig]):
    """PPO with a critic: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9; turns as in arXiv:2512.17008.

    An action is a turn, and its state is the prompt before it. Generalized advantage estimation runs over the turns of
    each trajectory (gae.py). The advantages of all turns of the step are shifted and scaled to mean 0 and standard
    deviation 1 together, and each turn's is given to all its sampled tokens.

    A group whose rewards are equal has signal here, because attempts are compared with the critic's values and not with
    each other. Where all advantages of a step are equal (to 1e-8), the critic alone is trained.
    """

    reads_policy = True
    _policy: "Reader"
    _numbers: dict[str, float] = {}

    def bind(self, policy: "Reader", directory: Path) -> None:
        self._policy = policy

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit]]:
        knobs, trajectories = self.knobs, [trajectory for group in groups for trajectory in group]
        values = turn_values(trajectories, self._policy.values)
        self._numbers = critic_numbers(trajectories, values, gamma=knobs.gamma)
        return credit_by_values(groups, values, gamma=knobs.gamma, gae_lambda=knobs.gae_lambda)

    def numbers(self) -> dict[str, float]:
        return self._numbers

    def value_error(self, terms: ValueTerms) -> "Tensor":
        return clipped_value_error(terms, self.knobs.value_clip)

    def value_share(self, update: UpdateCounts) -> float:
        return self.knobs.value_coefficient / update.tokens
