"""Judges, which turn a group into one score each: the Judge base class and the table of built-ins.

A judge sees the trajectories of one group that finished without error, and answers by trajectory id. It never makes up
a score: when it cannot score a group, it raises JudgeError and the group stays owed.

    rollout_judge.py, function_judge.py, reward_model.py and blend.py are a judge each
    trl_rewards.py, openai_grader.py   judges of other tools, which a user's `judge.entry` names
    ruler/           RULER: a language model scores the attempts of a group against each other
    providers/       the models that judge: one call to one of them, and when to make it again
    costs.py         usage, prices, estimates, budget
    retirement.py    the days on which providers shut models down
    judge_groups.py  judges one group, or many at once
    extra_votes.py   extra rounds of votes where noise hides the differences within a group
    trial.py         the keys of a judge, and one question to each of its models, for `art check`
    shadow_judges.py scores beside the trained reward
    files/           judges a file into another, and goes on where it stopped
    judge_report.py  reads scored files and reports how far a judge can be trusted; agreement.py measures it
    judge_probe.py   asks a judge about attempts that are changed on purpose (probe_edits.py), and measures its biases
    judge_text.py    text that a judge is shown
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from art_cli.judges.costs import CostEstimate, Usage
from art_cli.runs.trajectory import Score, Trajectory
from art_cli.runtime.errors import UsageError
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
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory's result: the reward it is trained with, and the scores behind it."""

    reward: float  # finite
    scores: list[Score] = []
    # error variance of the reward's distance to its group's mean, at least 0, or None if unknown, as with a single vote
    variance: float | None = None


class Judge:
    """Base class of all judges. `judge` is the one method that a judge must have; everything else has a default.

    A built-in judge is made as `Class(config, directory, job=...)`: its section of the configuration, the directory
    that paths are relative to, and the name of the job whose budget it spends. A user's own judge is made as
    `Class(**judge.options)`.
    """

    title: str = "judge"
    """Its name in messages."""
    timeout_s: float = 600.0
    """Longest time that one verdict is expected to take."""
    in_flight: int = 16
    """Groups to judge at once: enough to keep the judge busy while other groups are read and written."""
    needs_reward: bool = False
    """Whether it refuses a rollout that returned no reward."""
    noise: "NoiseConfig | None" = None
    """The configured model of its errors; `make_judge` sets it."""
    spent_usd: float = 0.0
    """Dollars that earlier processes of its job spent, as far as it keeps a record of them."""
    is_priced: bool = True
    """Whether the price of each of its calls is known."""
    has_rounds: bool = False
    """Whether it can be asked for further rounds of votes (`judge_again`)."""

    compares: bool = False
    """Whether its rewards only compare the attempts of one group. Otherwise those of all groups are on one scale."""

    @property
    def settings(self) -> str:
        """A digest of all that decides the rewards: two files with the same digest can be compared. May read files."""
        return ""

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns one verdict per trajectory id, complete. An empty group gives an empty mapping. Raises JudgeError."""
        raise NotImplementedError

    async def judge_again(self, group: Sequence[Trajectory], num_rounds: int) -> Mapping[str, Verdict]:
        """Returns the verdicts by the votes of `num_rounds` rounds together, 2 or more, on a group as in `judge`.

        The rounds before the last have been asked for and are not paid for again. Raises JudgeError.
        """
        raise NotImplementedError

    def of(self, group: Sequence[Trajectory]) -> "Judge":
        """Returns the judge that scores this group: itself, unless each source of groups has another one."""
        return self

    @property
    def usage(self) -> Usage:
        """Returns the usage of this process's calls."""
        return Usage()

    @property
    def num_cached(self) -> int:
        """Number of votes that this process found in the cache."""
        return 0

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        """Returns what judging this group would take now, or None if no call costs money."""
        return None

    @property
    def parts(self) -> "Sequence[Judge]":
        """The judges that this one consists of: itself, unless it blends others."""
        return (self,)

    @classmethod
    def for_trial(cls, config: Any, directory: Path) -> "Judge":
        """Returns the judge to try before a run: it asks each of its models once and uses no cache."""
        judge: Judge = cast(Any, cls)(config, directory)
        return judge

    @classmethod
    def missing_keys(cls, config: Any, directory: Path) -> dict[str, str]:
        """Returns the environment variables without which every call would fail -> the model that needs each."""
        return {}

    async def close(self) -> None:
        """Releases what the judge holds."""


def make_judge(config: "JudgeConfig", directory: Path, *, job: str = "") -> Judge:
    """Returns the judge that a configuration names; paths in it are relative to `directory`.

    `job` names whose budget is spent: what that job spent before, in other processes, counts. Raises UsageError: what
    the configuration names cannot be loaded.
    """
    judge: Judge = judge_class(config, directory)(config, directory, job=job)
    judge.noise = None if config.name == "none" else config.noise
    if judge.noise is not None and judge.noise.ask_again and not judge.has_rounds:
        raise UsageError(f"judge.noise.ask_again: judge {config.name!r} has no further votes (Judge.judge_again)")
    return judge


def settings_of(judge: Judge) -> str:
    """Returns a digest of all that decides the rewards, and what scored lines say of their noise."""
    if judge.noise is None:
        return judge.settings
    return make_key(settings=judge.settings, noise=judge.noise.model_dump(mode="json"))[:12]


def judge_class(config: "JudgeConfig", directory: Path) -> Any:
    """Returns the class of the judge that a configuration names."""
    return resolve(BUILT_INS[config.name], base=directory)


def make_key(**parts: object) -> str:
    """Returns a digest of `parts`, which decide a verdict; the same in every process."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
