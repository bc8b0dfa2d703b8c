"""BlendJudge: the weighted mean of several judges' rewards.

A group that one of them cannot score stays owed: a mean over the others would be another judge's reward.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.schema import BlendJudgeConfig, NamedJudgeConfig, RolloutJudgeConfig, RulerJudgeConfig
from art_cli.judges import Judge, Verdict, make_judge
from art_cli.judges.cache import make_key
from art_cli.trajectory import Score, Trajectory


class BlendJudge:
    """Weights are taken relative to their sum: {ruler: 7, rollout: 3} is {ruler: 0.7, rollout: 0.3}."""

    def __init__(self, config: BlendJudgeConfig, directory: Path, *, job: str = "") -> None:
        self.weights = config.blend
        defaults: dict[str, NamedJudgeConfig] = {
            "ruler": RulerJudgeConfig(name="ruler"),
            "rollout": RolloutJudgeConfig(),
        }
        named = defaults | config.judges
        self.judges: dict[str, Judge] = {name: make_judge(named[name], directory, job=job) for name in config.blend}

    @property
    def settings(self) -> str:
        """A digest of the weights and of what each judge goes by."""
        parts = {name: [weight, self.judges[name].settings] for name, weight in self.weights.items()}
        return make_key(blend=parts)[:12]

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """The weighted mean, with every judge's scores beside it. Raises what the first failing judge raises."""
        results = await asyncio.gather(*(judge.judge(group) for judge in self.judges.values()), return_exceptions=True)
        answers: dict[str, Mapping[str, Verdict]] = {}
        for name, result in zip(self.judges, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            answers[name] = result
        return {trajectory.id: self._blend(trajectory.id, answers) for trajectory in group}

    def _blend(self, trajectory_id: str, answers: Mapping[str, Mapping[str, Verdict]]) -> Verdict:
        verdicts = {name: answer[trajectory_id] for name, answer in answers.items()}
        total = sum(self.weights[name] * verdict.reward for name, verdict in verdicts.items())
        scores = [
            score
            for name, verdict in verdicts.items()
            for score in verdict.scores or [Score(judge=name, score=verdict.reward)]
        ]
        return Verdict(reward=total / sum(self.weights.values()), scores=scores)

    async def close(self) -> None:
        for judge in self.judges.values():
            await judge.close()
