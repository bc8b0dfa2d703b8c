"""API keys of a judge, and a trial before the run (`art check`).

Looking for keys makes no calls. The trial asks every judge model about two short attempts, bypassing the cache, and
returns the cost.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.schema import JudgeConfig
from art_cli.judges import Judge, Verdict, judge_class
from art_cli.judges.costs import Usage
from art_cli.judges.retirement import find_retiring, hosted_models
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError, UsageError

log = logging.getLogger(__name__)

QUESTION = {"role": "user", "content": "What is two plus two? Answer with one number."}
RIGHT, WRONG = "4", "22"
GRACE_S = 10.0  # extra seconds for a judge to raise its own timeout error


class Trial(NamedTuple):
    """A judge's answer to the trial question. Example: Trial(right=1.0, wrong=0.0, usage=Usage(...))"""

    right: float  # reward of the correct attempt
    wrong: float
    usage: Usage


def missing_keys(config: JudgeConfig, directory: Path) -> dict[str, str]:
    """Returns the environment variables that must still be set -> the model that needs the variable."""
    missing: dict[str, str] = judge_class(config, directory).missing_keys(config, directory)
    return missing


def require_keys(config: JudgeConfig, directory: Path, *, key: str = "judge") -> None:
    """Raises UsageError if an environment variable that the judge needs is not set.

    `key` is the dotted key of the judge in the configuration. Also warns about models close to their shutdown date.
    """
    for retiring in find_retiring(hosted_models(config)):
        log.warning("%s: %s; name another model", key, retiring)
    for name, model in missing_keys(config, directory).items():
        raise UsageError(f"{key}: {name} is not set, and {model} needs it; set it in the environment or in .env")


def make_trial_judge(config: JudgeConfig, directory: Path) -> Judge:
    """Creates a judge that asks each model once. Raises UsageError if the judge cannot be created."""
    judge: Judge = judge_class(config, directory).for_trial(config, directory)
    return judge


def short_attempts() -> list[Trajectory]:
    """Returns a right and a wrong answer to two plus two, as a group."""
    return [
        Trajectory(
            id=f"trial-{index}",
            group_id="trial",
            group_size=2,
            index=index,
            scenario={"id": "sum"},
            messages=[QUESTION, {"role": "assistant", "content": answer}],
        )
        for index, answer in enumerate((RIGHT, WRONG))
    ]


async def run_trial(judge: Judge) -> Trial:
    """Scores the two short attempts and closes the judge. Raises JudgeError if it gives no usable answer."""
    try:
        verdicts = await judge.judge(short_attempts())
        return Trial(verdicts["trial-0"].reward, verdicts["trial-1"].reward, judge.usage)
    finally:
        await judge.close()


async def judge_in_time(judge: Judge, attempts: Sequence[Trajectory]) -> Mapping[str, Verdict]:
    """Returns the judge's verdicts. Raises JudgeError if it fails or exceeds its timeout by more than GRACE_S."""
    deadline_s = judge.timeout_s + GRACE_S
    try:
        async with asyncio.timeout(deadline_s):
            return await judge.judge(attempts)
    except TimeoutError as error:
        raise JudgeError(f"judge={judge.title} did not answer within {deadline_s:g} s") from error
