"""Credit: what a trajectory is worth relative to its group. Numbers in, numbers out."""

import math
from collections.abc import Sequence

from art_cli.trajectory import ScoredTrajectory, Turn, has_signal


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


def rewards_of(group: Sequence[ScoredTrajectory]) -> list[float]:
    """[G] the rewards of trajectories that all have one."""
    return [trajectory.reward for trajectory in group if trajectory.reward is not None]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int) -> float:
    """What a reply of that length adds to its reward: 0 up to max - buffer, then falling evenly to -1 at max.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), equation 13. At max 100, buffer 20: 80 tokens 0, 90 tokens -0.5, 100 tokens
    and above -1.
    """
    free = max_tokens - min(buffer, max_tokens)
    return max(-1.0, min(0.0, (free - num_tokens) / (max_tokens - free)))


def seen_turns(trajectory: ScoredTrajectory) -> list[Turn]:
    """The turns whose replies the rollout received."""
    return [turn for turn in trajectory.turns if not turn.is_abandoned]
