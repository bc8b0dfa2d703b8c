"""Judges one group, or many at once: as many in flight as keep the calls busy, each handed on the moment it is done.

A group that cannot be scored stays owed, and JudgeProgress has the reason. Once no further group can be scored
(`JudgeStopped`), those in flight are finished and no new one is begun. Groups are drawn from an iterator only when
there is room for them, so that memory does not grow with their number.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from art_cli.judges import Judge, Verdict
from art_cli.judges.extra_votes import ask_again
from art_cli.runs.trajectory import RewardNoise, ScoredTrajectory, Trajectory, has_signal, score_trajectory
from art_cli.runtime.errors import DataError, JudgeError, JudgeStopped, first_of_group, printable

log = logging.getLogger(__name__)

Load = Callable[[], Sequence[Trajectory]]
Keep = Callable[[list[ScoredTrajectory]], None]

MAX_REWARD = 1e100  # beyond it sums and squares of rewards are no longer finite numbers


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
