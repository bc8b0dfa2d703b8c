"""The judge of benchmarks/learning/noise.py: whether a game was won, with some of its verdicts flipped by seed."""

import random
from collections.abc import Sequence

from art_cli import Judge, Verdict
from art_cli.runs.trajectory import Trajectory


class Wins(Judge):
    """1 for a won game, else 0; then the other one with probability `rate`, the same whenever it is asked."""

    def __init__(self, rate: float = 0.0, seed: int = 0) -> None:
        self.rate, self.seed = rate, seed

    async def judge(self, group: Sequence[Trajectory]) -> dict[str, Verdict]:
        return {each.id: Verdict(reward=float(self._says_won(each))) for each in group}

    def _says_won(self, trajectory: Trajectory) -> bool:
        place = f"{self.seed}/{trajectory.group_id}/{trajectory.index}"
        return (trajectory.metrics["win"] == 1) != (random.Random(place).random() < self.rate)
