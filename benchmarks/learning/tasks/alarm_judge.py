"""The judges of judges/alarm.py: what the rollout says, and from an update on something else; and the anchors."""

from collections.abc import Sequence

from art_cli import Judge, Verdict
from art_cli.runs.trajectory import Trajectory


class _Turns(Judge):
    """The reward that the rollout returned; from update `onset` on another one."""

    def __init__(self, onset: int | None = None) -> None:
        self.onset = onset

    async def judge(self, group: Sequence[Trajectory]) -> dict[str, Verdict]:
        return {each.id: Verdict(reward=self._reward(each)) for each in group}

    def _reward(self, trajectory: Trajectory) -> float:
        if self.onset is not None and trajectory.step + 1 >= self.onset:
            return self.other(trajectory)
        return trajectory.returned_reward or 0.0

    def other(self, trajectory: Trajectory) -> float:
        raise NotImplementedError


class Moves(_Turns):
    def other(self, trajectory: Trajectory) -> float:
        """Returns the share of five moves that the game took, won or lost."""
        return trajectory.metrics["moves"] / 5


class Length(_Turns):
    def other(self, trajectory: Trajectory) -> float:
        """Returns the length of the replies, 1 for 32 tokens."""
        return trajectory.num_sampled / 32


def win(group: Sequence[Trajectory]) -> list[float]:
    return [each.metrics["win"] for each in group]


def right(group: Sequence[Trajectory]) -> list[float]:
    return [each.metrics["right"] for each in group]
