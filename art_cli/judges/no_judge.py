"""NoJudge: nothing is judged, because nothing is learned from rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.sections.judge_config import NoJudgeConfig
from art_cli.judges import Judge, Verdict
from art_cli.runs.trajectory import Trajectory


class NoJudge(Judge):
    settings = "none"  # nothing about it can be set
    title = "none"

    def __init__(self, config: NoJudgeConfig, directory: Path, *, job: str = "") -> None:
        """Uses none of the arguments, which every judge is made with."""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns the reward that the rollout returned, so that metrics show it; 0 where it returned none."""
        return {trajectory.id: Verdict(reward=trajectory.returned_reward or 0.0) for trajectory in group}
