"""The judging of groups: many in flight, each handed on when done; further votes where noise hides a group; a trial.

A group that cannot be scored stays owed, and JudgeProgress has the reason. Once no further group can be scored
(`JudgeStopped`), those in flight are finished and no new one is begun. Groups are drawn from an iterator only when
there is room for them, so that memory does not grow with their number.

A group whose attempts its votes cannot tell apart gets further rounds of votes (`judge.noise.ask_again`).

    judge.judge -> reliability not above the bound? -> judge.judge_again(2 rounds) -> ... -> distinct, or left out

The votes of all rounds count together. What is asked follows from the votes alone, so that a judge which keeps its
votes is asked for none of them twice after a kill. Looking several times finds a difference by chance a little more
often than one look at as many votes would: the reliability is not corrected for that.

The trial of a judge comes before a run that needs it. It looks for keys, which makes no call, and asks every model of
the judge one question about two short attempts, without the cache. The result has the cost of that.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from art_cli.config.schema import JudgeConfig
from art_cli.judges import Judge, Verdict, judge_class
from art_cli.judges.costs import Usage
from art_cli.judges.reliability import share_of_scores
from art_cli.judges.retirement import find_retiring, hosted_models
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import (
    EQUAL_REWARDS,
    AskedAgain,
    RewardNoise,
    ScoredTrajectory,
    Trajectory,
    has_signal,
    score_trajectory,
)
from art_cli.runtime.errors import DataError, JudgeError, JudgeStopped, UsageError, first_of_group, printable

log = logging.getLogger(__name__)

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


def require_keys(config: JudgeConfig, directory: Path, *, key: str = "judge") -> None:
    """Raises UsageError when a variable that the judge needs is not set. `key` is the judge's in the configuration.

    Logs the models that their provider shuts down soon.
    """
    for retiring in find_retiring(hosted_models(config)):
        log.warning("%s: %s; name another model", key, retiring)
    for name, model in missing_keys(config, directory).items():
        raise UsageError(f"{key}: {name} is not set, and {model} needs it; set it in the environment or in .env")


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


class Asked(NamedTuple):
    """A group's verdicts by all its rounds. `again` is each trajectory's share of the further ones, if there are
    any."""

    verdicts: Mapping[str, Verdict]
    again: AskedAgain | None


async def ask_again(judge: Judge, group: Sequence[Trajectory], verdicts: Mapping[str, Verdict]) -> Asked:
    """Returns the verdicts after as many further rounds as it takes to tell the attempts apart, or as are allowed.

    A round without a usable answer is the last one, and the votes before it count. Raises JudgeStopped.
    """
    if judge.noise is None or not judge.noise.ask_again:
        return Asked(verdicts, None)
    first, rounds = verdicts, 0
    while rounds < judge.noise.ask_again and is_hidden(verdicts, judge.noise.min_reliability):
        try:
            verdicts = await judge.judge_again(group, rounds + 2)
        except JudgeStopped:
            raise
        except JudgeError as error:
            log.warning("%s: a further round of votes failed: %s", printable(group[0].group_id), printable(str(error)))
            break
        rounds += 1
    return Asked(verdicts, _took(first, verdicts, rounds) if rounds else None)


def is_hidden(verdicts: Mapping[str, Verdict], min_reliability: float) -> bool:
    """Returns whether the votes' differences hide those of the attempts; False without variances.

    Votes that agree on equal rewards are no noise: another round would say the same.
    """
    known = [verdict.variance for verdict in verdicts.values() if verdict.variance is not None]
    if not known or len(known) < len(verdicts):
        return False
    variance = math.fsum(known) / len(known)
    if not EQUAL_REWARDS**2 < variance < math.inf:
        return False
    return share_of_scores([verdict.reward for verdict in verdicts.values()], variance) <= min_reliability


def _took(first: Mapping[str, Verdict], last: Mapping[str, Verdict], rounds: int) -> AskedAgain:
    """Returns what the rounds after the first took by the scores' numbers, in equal shares."""
    tokens = _tokens(last.values()) - _tokens(first.values())
    costs = _cost(first.values()), _cost(last.values())
    cost = None if costs[0] is None or costs[1] is None else max(costs[1] - costs[0], 0.0) / len(last)
    return AskedAgain(rounds=rounds, tokens=max(tokens, 0.0) / len(last), cost_usd=cost)


def _tokens(verdicts: Iterable[Verdict]) -> float:
    scores = [score for verdict in verdicts for score in verdict.scores]
    return math.fsum((score.prompt_tokens or 0.0) + (score.completion_tokens or 0.0) for score in scores)


def _cost(verdicts: Iterable[Verdict]) -> float | None:
    """Returns dollars, or None if a score that took tokens has no known cost."""
    scores = [score for verdict in verdicts for score in verdict.scores if score.prompt_tokens is not None]
    costs = [score.cost_usd for score in scores]
    return None if any(cost is None for cost in costs) else math.fsum(cost for cost in costs if cost is not None)


Load = Callable[[], Sequence[Trajectory]]
Keep = Callable[[list[ScoredTrajectory]], None]

MAX_REWARD = MAX_NUMBER  # the learner takes none beyond; a group with one stays owed


class _Placed(Protocol):
    @property
    def group_id(self) -> str: ...
    @property
    def index(self) -> int: ...


AnyPlaced = TypeVar("AnyPlaced", bound=_Placed)


def by_group(rows: Iterable[AnyPlaced]) -> dict[str, list[AnyPlaced]]:
    """Group id -> its rows in the order of their index. Of several rows with the same index the last one counts."""
    groups: dict[str, dict[int, AnyPlaced]] = defaultdict(dict)
    for row in rows:
        groups[row.group_id][row.index] = row
    return {group_id: [members[index] for index in sorted(members)] for group_id, members in groups.items()}


@dataclass
class JudgeProgress:
    """The counts of judged and owed groups."""

    num_scored: int = 0
    owed: dict[str, str] = field(default_factory=dict)  # group id -> why it could not be scored
    stopped: str | None = None  # why no further group can be scored

    async def judge(self, judge: Judge, group_id: str, load: Load) -> list[ScoredTrajectory] | None:
        """Returns the group scored, or None if it could not be read or scored, and is noted as owed."""
        try:
            return await judge_group(judge, load())
        except (JudgeError, DataError) as error:
            self.owed[group_id] = str(error)
            if isinstance(error, JudgeStopped):
                self.stopped = self.stopped or str(error)
            else:
                log.warning("%s: not scored, still owed: %s", printable(group_id), printable(str(error)))
            return None


async def judge_group(judge: Judge, group: Sequence[Trajectory]) -> list[ScoredTrajectory]:
    """Returns the group scored, in its order; the judge sees only what finished without error. Raises JudgeError."""
    judge = judge.of(group)
    finished = [trajectory for trajectory in group if trajectory.error is None]
    try:
        verdicts, again = await ask_again(judge, finished, await judge.judge(finished))
    except RecursionError as error:  # texts, copies and digests of nested values walk them level by level
        raise JudgeError("its messages are nested too deeply to be judged") from error
    for name, verdict in verdicts.items():
        if not abs(verdict.reward) <= MAX_REWARD:
            raise JudgeError(f"trajectory {name}: the reward {verdict.reward:g} is beyond {MAX_REWARD:g}")
    known = noise(judge, verdicts)
    scored = []
    for trajectory in group:
        if trajectory.error is not None:
            scored.append(score_trajectory(trajectory, None))
        else:
            verdict = verdicts[trajectory.id]
            scored.append(score_trajectory(trajectory, verdict.reward, verdict.scores, noise=known, again=again))
    return scored


def noise(judge: Judge, verdicts: Mapping[str, Verdict]) -> RewardNoise | None:
    """Returns the known errors of a group's rewards, or None if none are configured, or no votes differ.

    Raises JudgeError: flip rates for other rewards than 0 and 1, or scores without a variance.
    """
    if judge.noise is None:
        return None
    rates, bound = (judge.noise.false_positive, judge.noise.false_negative), judge.noise.min_reliability
    if not judge.noise.is_from_votes:
        for name, verdict in verdicts.items():
            if verdict.reward not in (0, 1):
                raise JudgeError(
                    f"trajectory {name}: its reward is {verdict.reward:g}, and the flip rates of judge.noise are of "
                    "rewards 0 and 1"
                )
        return RewardNoise(false_positive=rates[0], false_negative=rates[1], min_reliability=bound)
    if not has_signal([verdict.reward for verdict in verdicts.values()]):
        return None
    known = [verdict.variance for verdict in verdicts.values() if verdict.variance is not None]
    if len(known) < len(verdicts) or not all(0 <= variance <= MAX_REWARD for variance in known):
        raise JudgeError("judge.noise is votes, and the judge gave no variance for each reward (Verdict.variance)")
    return RewardNoise(variance=sum(known) / len(known), min_reliability=bound)


async def judge_groups(
    judge: Judge,
    groups: Iterator[tuple[str, Load]],
    keep: Keep,
    *,
    in_flight: int,
    progress: Callable[[JudgeProgress], None] | None = None,
) -> JudgeProgress:
    """Loads and judges all groups and passes each scored group to `keep`.

    `groups` are pairs of a group's id and the function that reads its trajectories when its turn has come. When this
    call is cancelled, the groups in flight are dropped; what was kept stays kept.
    """
    done = JudgeProgress()

    async def work() -> None:
        while done.stopped is None and (group := next(groups, None)) is not None:
            if (scored := await done.judge(judge, *group)) is not None:
                keep(scored)
                done.num_scored += 1
            if progress is not None:
                progress(done)

    with first_of_group():  # the first failure, a full disk for example, is the cause
        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(work())
    return done
