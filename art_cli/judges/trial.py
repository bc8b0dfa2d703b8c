"""Tries a judge before a run needs it: keys that are not set, and one question about two short attempts.

Looking for keys makes no call. The question is asked of every model of the judge once, without the cache, and its cost
is told; `expected` says beforehand what it would take.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.schema import (
    BlendJudgeConfig,
    JudgeConfig,
    JudgeModelConfig,
    NamedJudgeConfig,
    RolloutJudgeConfig,
    RulerJudgeConfig,
)
from art_cli.errors import JudgeError, UsageError
from art_cli.judges import Judge, Verdict, make_judge
from art_cli.judges.cache import Usage
from art_cli.judges.estimate import Estimate, estimate
from art_cli.judges.keys import DEFAULT_KEY, load_environment
from art_cli.judges.ruler import RulerJudge
from art_cli.judges.spending import usage_of
from art_cli.trajectory import Trajectory

ASK = {"role": "user", "content": "What is two plus two? Answer with one number."}
RIGHT, WRONG = "4", "22"
RETRIES = 1  # of a call that failed by transport: a user is waiting


class Trial(NamedTuple):
    """What came of asking. Example: Trial(right=1.0, wrong=0.0, usage=Usage(...))"""

    right: float  # the reward of the attempt that answers rightly
    wrong: float
    usage: Usage  # what was paid


def parts(config: JudgeConfig) -> list[NamedJudgeConfig]:
    """The judges that a judge consists of: those of a blend, or itself."""
    if not isinstance(config, BlendJudgeConfig):
        return [config]
    defaults: dict[str, NamedJudgeConfig] = {
        "ruler": RulerJudgeConfig(name="ruler"),
        "rollout": RolloutJudgeConfig(),
    }
    return [(defaults | config.judges)[name] for name in config.blend]


def rulers(config: JudgeConfig) -> list[RulerJudgeConfig]:
    """The parts of a judge that ask language models, and cost money."""
    return [part for part in parts(config) if isinstance(part, RulerJudgeConfig)]


# --- keys -------------------------------------------------------------------------------------------------------------


def missing_keys(config: JudgeConfig, directory: Path) -> dict[str, str]:
    """The environment variables whose absence every call would fail by -> the model that needs them.

    Reads .env files as the judge does. Where a provider takes other credentials as well (a cloud's own, an address),
    the call has to say it: nothing is named.
    """
    load_environment(directory)
    return {name: member.model for member in _members(config) if (name := _missing_key(member))}


def require_keys(config: JudgeConfig, directory: Path) -> None:
    """Raises UsageError where a key that the judge needs is not set."""
    for name, model in missing_keys(config, directory).items():
        raise UsageError(f"judge: {name} is not set, and {model} needs it; set it in the environment or in .env")


def _members(config: JudgeConfig) -> Iterator[JudgeModelConfig]:
    for ruler in rulers(config):
        if ruler.panel:
            yield from ruler.panel
        else:
            yield ruler


def _missing_key(member: JudgeModelConfig) -> str | None:
    if member.api_key_env is not None:
        return None if os.environ.get(member.api_key_env) else member.api_key_env
    if member.api_base is not None or "api_key" in member.params:
        return None
    if not member.needs_litellm:
        return None if os.environ.get(DEFAULT_KEY) else DEFAULT_KEY
    names = _names_missing(member.model)
    return " or ".join(names) if names and all(name.endswith("_API_KEY") for name in names) else None


def _names_missing(model: str) -> list[str]:
    """The variables that litellm would read for this model and does not find; empty where it does not know."""
    from art_cli.judges.litellm_provider import _import_litellm

    try:
        found: Mapping[str, object] = _import_litellm().validate_environment(model)
    except Exception:  # the boundary to litellm: without it, or for a model that it cannot place, the call will say
        return []
    names = found.get("missing_keys")
    return [str(name) for name in names] if isinstance(names, list) else []


# --- the question -----------------------------------------------------------------------------------------------------


def short_attempts() -> list[Trajectory]:
    """Two attempts at a sum, the right one and a wrong one."""
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


def expected(config: RulerJudgeConfig, directory: Path) -> Estimate:
    """What `ask` would take; makes no call. Raises UsageError: the judge cannot be made."""
    judge = _make(config, directory)
    try:
        return estimate(judge, short_attempts())
    finally:
        judge.cache.close()


async def ask(config: RulerJudgeConfig, directory: Path) -> Trial:
    """The judge's word on the two short attempts. Raises JudgeError: it gave no usable answer; UsageError."""
    judge = _make(config, directory)
    try:
        verdicts = await judge.judge(short_attempts())
        return Trial(verdicts["trial-0"].reward, verdicts["trial-1"].reward, usage_of(judge)[0])
    finally:
        await judge.close()


async def score(config: NamedJudgeConfig, directory: Path, attempts: Sequence[Trajectory]) -> Mapping[str, Verdict]:
    """What a judge that costs nothing says of attempts that were played. Raises JudgeError, UsageError."""
    judge: Judge = make_judge(config, directory)
    try:
        async with asyncio.timeout(_deadline_s(config)):
            return await judge.judge(attempts)
    except TimeoutError as error:
        raise JudgeError(f"judge={config.name} did not answer within {_deadline_s(config):g} s") from error
    finally:
        await judge.close()


def _deadline_s(config: NamedJudgeConfig) -> float:
    return float(getattr(config, "timeout_s", 600.0)) + 10.0


def _make(config: RulerJudgeConfig, directory: Path) -> RulerJudge:
    asked_once = {"votes": 1, "attempts": 1, "retries": min(config.retries, RETRIES), "cache": None}
    judge = make_judge(config.model_copy(update=asked_once), directory)
    assert isinstance(judge, RulerJudge), "a ruler's configuration makes a RulerJudge"
    return judge
