"""Judges: the Judge base class and the table of built-in judges. A judge gives every attempt of a group a score.

A judge sees a group's finished trajectories without an error and answers by trajectory id. Scores are never made up: if
a judge cannot score a group, it raises JudgeError and the group stays owed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from art_cli.judges.costs import CostEstimate, Usage
from art_cli.runs.trajectory import Score, Trajectory
from art_cli.runtime.plugins import resolve

if TYPE_CHECKING:
    from art_cli.config.schema import JudgeConfig, NoiseConfig

BUILT_INS = {
    "rollout": "art_cli.judges.rollout_judge:RolloutJudge",
    "metric": "art_cli.judges.rollout_judge:MetricJudge",
    "none": "art_cli.judges.rollout_judge:NoJudge",
    "function": "art_cli.judges.function_judge:FunctionJudge",
    "ruler": "art_cli.judges.ruler.ruler_judge:RulerJudge",
    "reward_model": "art_cli.judges.reward_model:RewardModelJudge",
    "blend": "art_cli.judges.blend:BlendJudge",
    "cascade": "art_cli.judges.cascade:CascadeJudge",
    "feedback": "art_cli.judges.feedback_judge:FeedbackJudge",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory's training reward and the underlying scores."""

    reward: float  # finite
    scores: list[Score] = []
    # error variance of (reward - group mean), at least 0; None if unknown, for example with a single vote
    variance: float | None = None


class Judge:
    """Base class for all judges. Only `judge` must be implemented.

    Built-in judges are created as `Class(config, directory, job=...)`: the config section, the directory for relative
    paths, and the name of the job that pays. A user's judge class is created as `Class(**judge.options)`.
    """

    title: str = "judge"
    """Name shown in messages."""
    timeout_s: float = 600.0
    """Expected upper limit for the time of one verdict."""
    in_flight: int = 16
    """Number of groups to judge concurrently. Must be large enough to keep the judge busy during file I/O."""
    needs_reward: bool = False
    """Whether rollouts must return a reward."""
    noise: "NoiseConfig | None" = None
    """Configured error model, set by `make_judge`."""
    spent_usd: float = 0.0
    """Dollars spent by earlier processes of the same job, if recorded."""
    is_priced: bool = True
    """Whether all call prices are known."""
    compares: bool = False
    """Whether rewards are only comparable within a group. If False, all groups share one scale."""

    @property
    def settings(self) -> str:
        """A digest of all settings and files that influence the rewards. Files with equal digests are comparable. May
        read files.
        """
        return ""

    async def open(self) -> None:
        """Loads a model for the judge's GPU, before an engine takes the memory that is free there. Optional: `judge`
        loads what is missing. Raises JudgeError.
        """

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns a verdict for every trajectory id. An empty group gives an empty mapping. Raises JudgeError."""
        raise NotImplementedError

    def reseed(self) -> None:
        """Makes later verdicts independent of earlier ones, for a judge that caches its answers."""

    def of(self, group: Sequence[Trajectory]) -> "Judge":
        """Returns the judge for this group. Only SourceJudges returns a different judge per group."""
        return self

    def lacks_value(self, trajectory: Trajectory) -> bool:
        """Returns True if the rollout did not return what this judge reads. It is played again once it is mended."""
        return self.needs_reward and trajectory.error is None and trajectory.returned_reward is None

    @property
    def usage(self) -> Usage:
        """Returns the usage of this process's calls."""
        return Usage()

    @property
    def num_cached(self) -> int:
        """Number of votes found in the cache by this process."""
        return 0

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        """Returns the expected cost of judging this group now; None if judging is free."""
        return None

    @property
    def parts(self) -> "Sequence[Judge]":
        """The component judges of a blend or cascade; otherwise just this judge."""
        return (self,)

    @classmethod
    def for_trial(cls, config: Any, directory: Path) -> "Judge":
        """Returns a judge for a trial before the run: one call per model, without the cache."""
        judge: Judge = cast(Any, cls)(config, directory)
        return judge

    @classmethod
    def missing_keys(cls, config: Any, directory: Path) -> dict[str, str]:
        """Returns the environment variables that must still be set -> the model that needs the variable."""
        return {}

    async def close(self) -> None:
        """Releases what the judge holds."""


def make_judge(config: "JudgeConfig", directory: Path, *, job: str = "") -> Judge:
    """Creates the configured judge.

    `job` names the budget to charge, including amounts already spent by earlier processes of the same job. Raises
    UsageError if code or files named in the configuration cannot be loaded.
    """
    judge: Judge = judge_class(config, directory)(config, directory, job=job)
    judge.noise = None if config.name == "none" else config.noise
    return judge


def settings_of(judge: Judge) -> str:
    """Returns a digest of the judge's settings and error model."""
    if judge.noise is None:
        return judge.settings
    return make_key(settings=judge.settings, noise=judge.noise.model_dump(mode="json"))[:12]


def judge_class(config: "JudgeConfig", directory: Path) -> Any:
    """Returns the configured judge's class."""
    return resolve(BUILT_INS[config.name], base=directory)


def make_key(**parts: object) -> str:
    """Returns a digest of `parts`, stable across processes."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
