"""Algorithms: how a scored group becomes a weight for every trained token.

    credit      the trajectories of a group -> how strongly each is made likelier           credit.py
    objective   [N] terms -> what each one adds to the loss, before its share               objectives.py
    share       how much one token counts in the mean over the whole optimizer step         shares.py

The presets are in presets.py, one class each, with paper and equation. streams.py adds up what they give, pack by pack.
Tensors and numbers in, tensors and numbers out; float32 whatever the model's dtype is.
"""

from collections.abc import Sequence

from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms, clip_tokens
from art_cli.learners.algorithms.shares import UpdateCounts, token_mean
from art_cli.trajectory import ScoredTrajectory


class Algorithm:
    """Credit, objective and share. The three methods here are GRPO's; a subclass overrides those that differ."""

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        """[G] the advantage of each trajectory's tokens; None: the trajectory is not trained on.

        `group` holds the finished trajectories of one scenario, each with a finite reward. A group whose advantages
        are all zero is not trained on and not counted.
        """
        return advantages(rewards_of(group), scale=True)

    def objective(self, terms: PolicyTerms) -> Objective:
        """[N] what each term adds to the loss. All terms of a sample are in one call; a pack may have no terms."""
        return clip_tokens(terms, 0.2, 0.2)

    def share(self, num_tokens: int, update: UpdateCounts) -> float:
        """The factor of each token of a sample with `num_tokens` trained tokens. `update` counts the optimizer step."""
        return token_mean(num_tokens, update)
