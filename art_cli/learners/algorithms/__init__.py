"""Algorithms turn a scored group into a training weight for every token.

    credit      trajectories of a group or of all the step's groups -> token weights
                                                                                        credit.py, ../samples.py
    objective   [N] terms -> each policy token's contribution to the loss               objectives.py
    share       one token's factor in the mean over the whole optimizer step            normalization.py

presets.py lists the presets; each is a class citing paper and equation. An experiment is a single file that also
defines its config section (gigpo.py). pack_loss.py sums the results, pack by pack. Functions take and return tensors
and numbers, in float32 for any model dtype.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.normalization import UpdateCounts, token_mean
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms, ValueTerms, clip_tokens, clipped_value_error
from art_cli.learners.samples import Credit
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from torch import Tensor

    from art_cli.learners.packs.logprob_reader import Reader


class Algorithm:
    """Credit, objective and share. The defaults are GRPO's; a subclass overrides what differs.

    `credit` sees one group. An algorithm that compares groups, for example to divide by the whole step's standard
    deviation, overrides `credit_step` instead.
    """

    is_scaled = True  # whether advantages are divided by the standard deviation of the group's rewards
    compares_groups = False  # whether advantages also depend on other groups' rewards
    compares_states = False  # whether credit depends on which replies in a group answered equal states (step_credit.py)
    # whether one ratio covers a whole sample; it is then to the learner's probability before the step, because the
    # rounding of an engine adds up over a sample
    has_sample_ratio = False
    reads_policy = False  # whether credit needs the policy passed to `bind`
    is_pure = True  # whether objective and value_error have no side effects, so packs may be computed in parallel

    def bind(self, policy: "Reader", directory: Path) -> None:
        """Called once by the learner before training, with the policy for algorithms whose credit needs a model.

        `policy.logprobs` reads samples with the policy's current weights. Inside `credit_step` those are the weights
        before the step's updates. Paths in the knobs are relative to `directory`.
        """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        """Returns [G] each trajectory's advantage for its sampled tokens, or a Credit with token weights.

        None drops the trajectory. `group` holds the finished trajectories for one scenario, each with a finite reward.
        A component whose weights are all zero within the group is neither trained nor counted.
        """
        return advantages(rewards_of(group), scale=True)

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        """Returns the `credit` of all groups, in the order of `groups`. It is called once per step.

        `groups` are the step's groups that have a finished trajectory.
        """
        return [self.credit(group) for group in groups]

    def numbers(self) -> Mapping[str, float]:
        """Returns metrics from the last `credit_step`, under their StepMetrics names."""
        return {}

    def after_step(self) -> None:
        """Called in all learner processes after a complete step, not after a failed step or one without signal."""

    def save(self, directory: Path) -> None:
        """Writes the algorithm's state between steps into a checkpoint directory, so that `load` can continue exactly.

        All learner processes call it; rank 0 writes. Most algorithms have no state.
        """

    def load(self, directory: Path) -> None:
        """Restores saved state; starts fresh if the checkpoint has no state."""

    def objective(self, terms: PolicyTerms) -> Objective:
        """Returns [N] each term's contribution to the loss. One call covers whole samples; a pack may have no terms."""
        return clip_tokens(terms, 0.2, 0.2)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        """Returns the factor for every token in its component's mean.

        `num_tokens` counts the component's tokens in the token's sample, `update` counts them in the whole optimizer
        step.
        """
        return token_mean(num_tokens, update)

    def value_error(self, terms: ValueTerms) -> "Tensor":
        """Returns [N] non-negative errors for the critic's values. Only losses with a critic have value terms."""
        return clipped_value_error(terms, None)

    def value_share(self, update: UpdateCounts) -> float:
        """Returns the factor for every value error; `update.tokens` is the number of values in the optimizer step."""
        return 1.0 / update.tokens
