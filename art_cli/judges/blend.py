"""BlendJudge: the weighted mean of several judges' rewards. SeveralJudges: a judge made of others.

If one judge fails, the group stays owed, because a mean over the other judges would be a different reward.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from art_cli.config.schema import RunConfig
from art_cli.config.sections.judge_config import (
    BlendJudgeConfig,
    CascadeJudgeConfig,
    FeedbackJudgeConfig,
    NamedJudgeConfig,
    NoJudgeConfig,
    RolloutJudgeConfig,
    RulerJudgeConfig,
)
from art_cli.judges import Judge, Verdict, judge_class, make_judge, make_key
from art_cli.judges.costs import CostEstimate, Usage
from art_cli.runs.trajectory import Score, Trajectory

AnySeveral = BlendJudgeConfig | CascadeJudgeConfig | FeedbackJudgeConfig


class SeveralJudges(Judge):
    """A judge that asks others, by name, and sums up what they cost."""

    def __init__(self, judges: Mapping[str, Judge]) -> None:
        self.judges = judges
        self.in_flight = max((judge.in_flight for judge in self.judges.values()), default=self.in_flight)
        self.needs_reward = any(judge.needs_reward for judge in self.judges.values())
        self.spent_usd = sum(judge.spent_usd for judge in self.judges.values())
        self.is_priced = all(judge.is_priced for judge in self.judges.values())

    @property
    def usage(self) -> Usage:
        return sum((judge.usage for judge in self.judges.values()), Usage())

    @property
    def num_cached(self) -> int:
        return sum(judge.num_cached for judge in self.judges.values())

    @property
    def parts(self) -> Sequence[Judge]:
        return list(self.judges.values())

    @classmethod
    def for_trial(cls, config: AnySeveral, directory: Path) -> "SeveralJudges":
        named = named_judges(config).items()
        tried = {name: judge_class(each, directory).for_trial(each, directory) for name, each in named}
        judge: SeveralJudges = cast(Any, cls)(config, directory, judges=tried)
        return judge

    @classmethod
    def missing_keys(cls, config: AnySeveral, directory: Path) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in named_judges(config).values():
            found |= judge_class(each, directory).missing_keys(each, directory)
        return found

    def lacks_value(self, trajectory: Trajectory) -> bool:
        return any(judge.lacks_value(trajectory) for judge in self.judges.values())

    def reseed(self) -> None:
        for judge in self.judges.values():
            judge.reseed()

    async def open(self) -> None:
        for judge in self.judges.values():
            await judge.open()

    async def close(self) -> None:
        for judge in self.judges.values():
            await judge.close()


class BlendJudge(SeveralJudges):
    """Weights are normalized: {ruler: 7, rollout: 3} means {ruler: 0.7, rollout: 0.3}."""

    title = "blend"

    def __init__(
        self, config: BlendJudgeConfig, directory: Path, *, job: str = "", judges: Mapping[str, Judge] | None = None
    ) -> None:
        super().__init__(judges or make_each(config, directory, job))
        self.weights = config.blend
        self.compares = any(judge.compares for judge in self.judges.values())

    @property
    def settings(self) -> str:
        """A digest of the weights and all component settings."""
        parts = {name: [weight, self.judges[name].settings] for name, weight in self.weights.items()}
        return make_key(blend=parts)[:12]

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns the weighted mean reward with all component scores. Raises the first component's error.

        Component judges without a variance always give the same reward and add no variance.
        """
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
        weight = sum(self.weights.values())
        known = {name: each.variance for name, each in verdicts.items() if each.variance is not None}
        variance = sum((self.weights[name] / weight) ** 2 * each for name, each in known.items()) if known else None
        return Verdict(reward=total / weight, scores=scores, variance=variance)

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        known = [each for judge in self.judges.values() if (each := judge.estimate(group)) is not None]
        return sum(known, CostEstimate()) if known else None


def make_each(config: AnySeveral, directory: Path, job: str) -> dict[str, Judge]:
    """Creates each judge in it. Several RULER judges have separate budgets."""
    named = named_judges(config)
    has_several = sum(isinstance(each, RulerJudgeConfig) for each in named.values()) > 1
    jobs = {name: f"{job}#{name}" if job and has_several else job for name in named}
    return {name: make_judge(each, directory, job=jobs[name]) for name, each in named.items()}


def single_judges(config: RunConfig) -> Iterator[NamedJudgeConfig | NoJudgeConfig]:
    """Yields the configuration of each judge of a run, also of those within a judge, and of shadow judges."""
    yield from (each.judge for each in config.shadow.values())
    for judge in (part.judge for part in config.by_source.values()):
        yield from named_judges(judge).values() if isinstance(judge, AnySeveral) else (judge,)


def named_judges(config: AnySeveral) -> dict[str, NamedJudgeConfig]:
    """Returns the configuration of each judge in it; in a blend, `ruler` and `rollout` have defaults."""
    if isinstance(config, CascadeJudgeConfig):
        return {"first": config.first, "then": config.then}
    if isinstance(config, FeedbackJudgeConfig):
        return {} if config.otherwise is None else {"otherwise": config.otherwise}
    defaults: dict[str, NamedJudgeConfig] = {"ruler": RulerJudgeConfig(name="ruler"), "rollout": RolloutJudgeConfig()}
    return {name: (defaults | config.judges)[name] for name in config.blend}
