"""RolloutJudge: the reward that the rollout itself returned, as it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.schema import RolloutJudgeConfig
from art_cli.errors import JudgeError
from art_cli.judges import Verdict
from art_cli.trajectory import Trajectory


class RolloutJudge:
    settings = "rollout"  # there is nothing to set

    def __init__(self, config: RolloutJudgeConfig, directory: Path) -> None:
        """Nothing to set up; both arguments are what every judge is made with."""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError: a rollout returned no reward. That one is never taken for a zero."""
        return {trajectory.id: Verdict(reward=_reward(trajectory)) for trajectory in group}

    async def close(self) -> None:
        return None


def _reward(trajectory: Trajectory) -> float:
    if trajectory.returned_reward is None:
        raise JudgeError(
            f"trajectory {trajectory.id}: the rollout returned no reward; "
            "return a number from it, or let another judge score it (judge=ruler)"
        )
    return trajectory.returned_reward
