"""Algorithms: how a scored group becomes a weight for every trained token.

    credit      the trajectories of a group, or of all groups of the step -> the weights of their tokens
                                                                                        credit.py, ../samples.py
    objective   [N] terms -> what each token of the policy component adds to the loss   objectives.py
    share       how much one token counts in the mean over the whole optimizer step     normalization.py

presets.py has the table of the presets, each a class with paper and equation. An experiment is one file, which has its
options too (gigpo.py). pack_loss.py adds up what they give, pack by pack.
Tensors and numbers in, tensors and numbers out; float32 whatever the model's dtype is.
"""

from collections.abc import Sequence
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
    """Credit, objective and share. The methods here are GRPO's; a subclass overrides those that differ.

    `credit` sees one group. An algorithm that compares groups, such as one that divides by the standard deviation of
    the whole step, overrides `credit_step` instead.
    """

    is_scaled = True  # whether advantages are divided by the standard deviation of the group's rewards
    compares_states = False  # whether credit depends on which replies of a group answered equal states (step_credit.py)
    reads_policy = False  # whether credit needs the policy that `bind` is called with
    is_pure = True  # whether objective and value_error change nothing, so that several packs may be computed at a time

    def bind(self, policy: "Reader", directory: Path) -> None:
        """Called once by the learner, before the first step. An algorithm whose credit needs a model keeps `policy`.

        `policy.logprobs` reads samples with the policy's present weights; in `credit_step` those are the weights before
        the step's first update. Paths in the knobs are relative to `directory`.
        """

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit | float | None]:
        """Returns [G] the advantage of each trajectory's sampled tokens, or a Credit with weights of its tokens.

        None leaves the trajectory out. `group` holds the finished trajectories of one scenario, each with a finite
        reward. A component whose weights are all zero in the group is not trained and not counted.
        """
        return advantages(rewards_of(group), scale=True)

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        """Returns the `credit` of each group of the step, in the order of `groups`. It is called once per step.

        `groups` holds those groups of the step that have a finished trajectory.
        """
        return [self.credit(group) for group in groups]

    def numbers(self) -> dict[str, float]:
        """Returns metrics of the last `credit_step`, by the names that StepMetrics has for them."""
        return {}

    def after_step(self) -> None:
        """Called once after each step that was taken whole, by all processes of a learner. A step that fails, or one
        whose groups had no signal, does not count."""

    def save(self, directory: Path) -> None:
        """Writes into a checkpoint directory what the algorithm remembers between steps, so that `load` goes on bit for
        bit. All processes of a learner call it, and the first one writes. Most algorithms remember nothing."""

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote there; where nothing was written, begins anew."""

    def objective(self, terms: PolicyTerms) -> Objective:
        """Returns [N] each term's part of the loss. All terms of a sample are in one call; a pack may have none."""
        return clip_tokens(terms, 0.2, 0.2)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        """Returns the factor of each token in the mean of its component.

        `num_tokens` counts the component's tokens in the token's sample, `update` those in the whole optimizer step.
        """
        return token_mean(num_tokens, update)

    def value_error(self, terms: ValueTerms) -> "Tensor":
        """Returns [N] the errors of the critic's values, not negative. Only a loss with a critic has such terms."""
        return clipped_value_error(terms, None)

    def value_share(self, update: UpdateCounts) -> float:
        """Returns the factor of each error of a value: `update.tokens` counts the values in the optimizer step."""
        return 1.0 / update.tokens
