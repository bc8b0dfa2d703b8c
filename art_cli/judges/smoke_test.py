"""The trial of a judge before a run needs it: keys that are not set, and one question about two short attempts.

Looking for keys makes no call. Every model of the judge is asked the question once, without the cache, and the result
says what that cost.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.schema import JudgeConfig
from art_cli.judges import Judge, Verdict, judge_class
from art_cli.judges.costs import Usage
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError, UsageError

ASK = {"role": "user", "content": "What is two plus two? Answer with one number."}
RIGHT, WRONG = "4", "22"
GRACE_S = 10.0  # time beyond a judge's own deadline, at which it should have raised its own error


class Trial(NamedTuple):
    """The result of asking. Example: Trial(right=1.0, wrong=0.0, usage=Usage(...))"""

    right: float  # the reward of the attempt that answers correctly
    wrong: float
    usage: Usage  # usage of this one question


def missing_keys(config: JudgeConfig, directory: Path) -> dict[str, str]:
    """Returns the environment variables without which every call would fail -> the model that needs each."""
    found: dict[str, str] = judge_class(config, directory).missing_keys(config, directory)
    return found


def require_keys(config: JudgeConfig, directory: Path) -> None:
    """Raises UsageError when a key that the judge needs is not set."""
    for name, model in missing_keys(config, directory).items():
        raise UsageError(f"judge: {name} is not set, and {model} needs it; set it in the environment or in .env")


def make_trial_judge(config: JudgeConfig, directory: Path) -> Judge:
    """Returns the judge to try, which asks each of its models once. Raises UsageError if it cannot be made."""
    judge: Judge = judge_class(config, directory).for_trial(config, directory)
    return judge


def short_attempts() -> list[Trajectory]:
    """Returns two attempts at a sum, the right one and a wrong one."""
    return [
        Trajectory(
            id=f"trial-{index}",
            group_id="trial",
            group_size=2,
            index=index,
            scenario={"id": "sum"},
            messages=[ASK, {"role": "assistant", "content": said}],
        )
        for index, said in enumerate((RIGHT, WRONG))
    ]


async def ask(judge: Judge) -> Trial:
    """Returns the verdict of a judge that costs money on the two short attempts; closes the judge.

    Raises JudgeError if it gave no usable answer.
    """
    try:
        verdicts = await judge.judge(short_attempts())
        return Trial(verdicts["trial-0"].reward, verdicts["trial-1"].reward, judge.usage)
    finally:
        await judge.close()


async def score(judge: Judge, attempts: Sequence[Trajectory]) -> Mapping[str, Verdict]:
    """Returns the verdict of a judge that costs nothing on attempts that were played. Raises JudgeError."""
    deadline_s = judge.timeout_s + GRACE_S
    try:
        async with asyncio.timeout(deadline_s):
            return await judge.judge(attempts)
    except TimeoutError as error:
        raise JudgeError(f"judge={judge.title} did not answer within {deadline_s:g} s") from error
