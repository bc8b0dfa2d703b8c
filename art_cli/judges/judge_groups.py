"""The judging of groups: many in flight, each passed on as soon as it is scored.

A group that cannot be scored stays owed, with its reason in JudgeProgress. After `JudgeStopped` the groups in flight
are finished, and no new group is started. Groups are read from the iterator only when there is room for them, so memory
does not grow with the number of groups.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from art_cli.judges import Judge, Verdict
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import (
    RewardNoise,
    ScoredTrajectory,
    Trajectory,
    has_signal,
    score_trajectory,
)
from art_cli.runtime.errors import DataError, JudgeError, JudgeStopped, first_of_group, printable

log = logging.getLogger(__name__)

Load = Callable[[], Sequence[Trajectory]]
Keep = Callable[[list[ScoredTrajectory]], None]


@dataclass
class JudgeProgress:
    """Counts of judged and owed groups."""

    num_scored: int = 0
    owed: dict[str, str] = field(default_factory=dict)  # group id -> reason
    stopped: str | None = None  # why no further group can be scored

    async def judge(self, judge: Judge, group_id: str, load: Load) -> list[ScoredTrajectory] | None:
        """Returns the scored group. A group that cannot be read or scored is added to `owed`."""
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
    """Returns the scored group in its original order. The judge sees only finished attempts without an error.

    The policy's own failure gets at most the lowest reward of the attempts without failure: failing must never pay.

    Raises JudgeError.
    """
    judge = judge.of(group)
    finished = [trajectory for trajectory in group if trajectory.error is None]
    try:
        verdicts = await judge.judge(finished)
    except RecursionError as error:  # from recursive functions for text, copies and digests
        raise JudgeError("its messages are nested too deeply to be judged") from error
    for name, verdict in verdicts.items():
        if not abs(verdict.reward) <= MAX_NUMBER:
            raise JudgeError(f"trajectory {name}: the reward {verdict.reward:g} is beyond {MAX_NUMBER:g}")
    noise = reward_noise(judge, verdicts)
    lowest = min((verdicts[each.id].reward for each in finished if not each.failure), default=math.inf)
    scored = []
    for trajectory in group:
        if trajectory.error is not None:
            scored.append(score_trajectory(trajectory, None))
        else:
            verdict = verdicts[trajectory.id]
            reward = min(verdict.reward, lowest) if trajectory.failure else verdict.reward
            scored.append(score_trajectory(trajectory, reward, verdict.scores, noise=noise))
    return scored


def reward_noise(judge: Judge, verdicts: Mapping[str, Verdict]) -> RewardNoise | None:
    """Returns the error model of a group's rewards; None if `judge.noise` is not set or all rewards are equal.

    Raises JudgeError if flip rates meet a reward other than 0 or 1, or if votes come without a variance.
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
    if len(known) < len(verdicts) or not all(0 <= variance <= MAX_NUMBER for variance in known):
        raise JudgeError("judge.noise is votes, but the judge gave no variance for some rewards (Verdict.variance)")
    return RewardNoise(variance=sum(known) / len(known), min_reliability=bound)


async def judge_groups(
    judge: Judge,
    groups: Iterator[tuple[str, Load]],
    keep: Keep,
    *,
    in_flight: int,
    progress: Callable[[JudgeProgress], None] | None = None,
) -> JudgeProgress:
    """Loads and judges all groups; passes each scored group to `keep`.

    `groups` yields pairs of a group id and a function that reads the group's trajectories. Cancelling drops the groups
    in flight; groups already passed to `keep` stay.
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
