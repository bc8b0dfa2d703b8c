"""RolloutJudge: uses the rollout's own reward. MetricJudge: uses a rollout metric. NoJudge: no rewards."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.sections.judge_config import MetricJudgeConfig, NoJudgeConfig, RolloutJudgeConfig
from art_cli.judges import Judge, Verdict
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError


class NoJudge(Judge):
    settings = "none"  # nothing about it can be set
    title = "none"

    def __init__(self, config: NoJudgeConfig, directory: Path, *, job: str = "") -> None:
        """Accepts the common arguments and ignores them."""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns the rollout's reward for the metrics, or 0."""
        return {trajectory.id: Verdict(reward=trajectory.returned_reward or 0.0) for trajectory in group}


class RolloutJudge(Judge):
    settings = "rollout"  # nothing about it can be set
    title = "rollout"
    needs_reward = True

    def __init__(self, config: RolloutJudgeConfig, directory: Path, *, job: str = "") -> None:
        """Accepts the common arguments and ignores them."""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError if a rollout returned no reward; a missing reward is never treated as zero."""
        return {trajectory.id: Verdict(reward=_reward(trajectory)) for trajectory in group}


class MetricJudge(Judge):
    def __init__(self, config: MetricJudgeConfig, directory: Path, *, job: str = "") -> None:
        """Uses only `config`."""
        self._metric, self.title = config.metric, f"metric {config.metric}"

    @property
    def settings(self) -> str:
        return self.title

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError if a rollout did not report the metric."""
        return {each.id: Verdict(reward=self._value(each)) for each in group}

    def lacks_value(self, trajectory: Trajectory) -> bool:
        return trajectory.error is None and trajectory.reported(self._metric) is None

    def _value(self, trajectory: Trajectory) -> float:
        value = trajectory.reported(self._metric)
        if value is None:
            there = ", ".join(sorted(trajectory.metrics)) or "none"
            raise JudgeError(f"trajectory {trajectory.id}: no metric {self._metric!r}; it reports {there}")
        return value


def _reward(trajectory: Trajectory) -> float:
    if trajectory.returned_reward is None:
        raise JudgeError(
            f"trajectory {trajectory.id}: the rollout returned no reward; "
            "return a number from it, or let another judge score a new run (judge=ruler)"
        )
    return trajectory.returned_reward
