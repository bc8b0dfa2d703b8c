"""The entropy floor: a bonus for entropy whose coefficient grows while the policy's entropy is too low."""

import math

import msgspec


class EntropyState(msgspec.Struct, frozen=True):
    """The state that one step leaves for the next. Example: EntropyState(coefficient=0.01, is_below=True)"""

    coefficient: float = 0.0
    is_below: bool = False  # whether the last measured entropy was below the floor

    @property
    def bonus(self) -> float:
        """The bonus per nat that the next step gives: nothing above the floor."""
        return self.coefficient if self.is_below else 0.0

    def after(self, entropy: float, *, floor: float, step: float) -> "EntropyState":
        """Returns the state after a step of that mean entropy in nats: the coefficient is a `step` larger or smaller.

        Skywork-OR1, He et al. 2025 (arXiv:2505.22312), adaptive entropy control: c' = c + step if entropy < floor,
        else c - step, here never below 0; the loss has -c * entropy where the entropy is at most the floor. The paper
        asks that of the step's own entropy, and this of the step's before, so that nothing is computed twice. A step
        whose entropy is NaN, because it trained no sampled token, changes nothing.
        """
        if math.isnan(entropy):
            return self
        grown = self.coefficient + (step if entropy < floor else -step)
        return EntropyState(max(0.0, grown), entropy <= floor)
