"""An algorithm that gives tokens weights of their own in each component of the loss."""

from collections.abc import Sequence

import numpy as np

from art_cli.learners.algorithms import Algorithm
from art_cli.learners.samples import Credit
from art_cli.runs.trajectory import ScoredTrajectory, Turn


class Streams(Algorithm):
    """Sampled tokens: policy (another advantage for each) and reference_kl; prompt tokens: cross_entropy.

    Every third token is left out of policy, every fourth out of reference_kl, every second out of cross_entropy.
    """

    def __init__(self, components: Sequence[str]) -> None:
        self.components = components

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[Credit]:
        return [Credit(**{name: self.weights(name, t) for name in self.components}) for t in group]

    def weights(self, component: str, trajectory: ScoredTrajectory) -> list[list[float]]:
        return [[weight(component, trajectory.index, *token) for token in tokens(turn)] for turn in trajectory.turns]


def tokens(turn: Turn) -> list[tuple[int, bool]]:
    """(place in the turn, whether it was sampled) of each token that the turn adds."""
    count = len(turn.prompt_ids)
    return [(place, place >= count) for place in range(count + len(turn.sampled_ids))]


def weight(component: str, index: int, place: int, is_sampled: bool) -> float:
    if is_sampled != (component != "cross_entropy"):
        return np.nan
    match component:
        case "policy":
            return np.nan if place % 3 == 2 else (-1) ** index * (1 + 0.1 * place)
        case "reference_kl":
            return np.nan if place % 4 == 3 else 0.2 + 0.1 * index
        case _:
            return np.nan if place % 2 else 0.3 + 0.05 * place
