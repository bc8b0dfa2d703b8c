"""Judges many groups at once: as many in flight as keep the calls busy, each handed on the moment it is done.

Groups are drawn from an iterator only when there is room, so that memory does not grow with their number. A group that
cannot be scored is counted and stays owed; when no further group can be (`JudgeStopped`), what is in flight is finished
and nothing new begun.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from art_cli.errors import DataError, JudgeError, JudgeStopped, first_of_group, printable
from art_cli.judges import Judge
from art_cli.trajectory import ScoredTrajectory, Trajectory, score_trajectory

log = logging.getLogger(__name__)

Load = Callable[[], list[Trajectory]]
Keep = Callable[[list[ScoredTrajectory]], None]

MAX_REWARD = 1e100  # past it sums and squares of rewards are no longer finite numbers


@dataclass
class JudgeProgress:
    """What became of the groups. `owed` says why, by group id; `stopped` why no further group was begun."""

    num_scored: int = 0
    owed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None


async def judge_group(judge: Judge, group: Sequence[Trajectory]) -> list[ScoredTrajectory]:
    """The group scored, in its order; the judge sees only what finished without error. Raises JudgeError."""
    try:
        verdicts = await judge.judge([trajectory for trajectory in group if trajectory.error is None])
    except RecursionError as error:  # texts, copies and digests of what is nested walk it level by level
        raise JudgeError("its messages are nested too deeply to be judged") from error
    scored = []
    for trajectory in group:
        if trajectory.error is not None:
            scored.append(score_trajectory(trajectory, None))
        else:
            verdict = verdicts[trajectory.id]
            if not abs(verdict.reward) <= MAX_REWARD:
                raise JudgeError(f"trajectory {trajectory.id}: the reward {verdict.reward:g} is beyond {MAX_REWARD:g}")
            scored.append(score_trajectory(trajectory, verdict.reward, verdict.scores))
    return scored


async def judge_groups(
    judge: Judge,
    groups: Iterator[tuple[str, Load]],
    keep: Keep,
    *,
    in_flight: int,
    progress: Callable[[JudgeProgress], None] | None = None,
) -> JudgeProgress:
    """Loads and judges all groups and `keep`s each. A group that cannot be read stays owed, as one without a verdict.

    `groups` are pairs of a group's id and the function that reads its trajectories when its turn has come.
    Cancelled, it lets go of what is in flight; what was kept stays kept.
    """
    done = JudgeProgress()

    async def work() -> None:
        while done.stopped is None and (group := next(groups, None)) is not None:
            group_id, load = group
            try:
                keep(await judge_group(judge, load()))
                done.num_scored += 1
            except (JudgeError, DataError) as error:
                done.owed[group_id] = str(error)
                if isinstance(error, JudgeStopped):
                    done.stopped = done.stopped or str(error)
                else:
                    log.warning("%s: not scored, still owed: %s", printable(group_id), printable(str(error)))
            if progress is not None:
                progress(done)

    with first_of_group():
        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(work())
    return done
