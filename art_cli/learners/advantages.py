"""What a reward is worth relative to its group. Numbers in, numbers out."""

import math
from collections.abc import Sequence

EQUAL = 1e-8  # rewards this close carry no signal: what is left between them is rounding, not preference


def advantages(rewards: Sequence[float], *, scale: bool) -> list[float]:
    """[G] reward minus the group's mean, divided by the group's standard deviation where `scale` is set.

    GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r). The deviation is the
    sample's (division by G - 1), as in TRL and verl; without `scale` it is Dr. GRPO's A_i = r_i - mean(r)
    (arXiv:2503.20783). Nothing is added to the deviation, so that scaled advantages do not depend on the rewards' unit.

    An empty group gives []; a group of one, or rewards equal to 1e-8, gives zeros and exactly zeros.
    """
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / deviation for value in centred]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ by more than 1e-8; an empty group has no signal."""
    assert all(map(math.isfinite, rewards)), f"rewards must be finite: {list(rewards)}"
    return len(rewards) > 0 and max(rewards) - min(rewards) > EQUAL
