"""The attempts that a step still owes, and the scoring of completed groups.

Reads and writes the step's trajectories.jsonl and scored.jsonl through run_dir. A step owes attempts without a
trajectory, and scored lines for complete groups. Trajectories are written to disk before counting.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from art_cli.judges import Judge
from art_cli.judges.judge_groups import JudgeProgress
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.durable import LineWriter
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, by_group

AnyTrajectory = TypeVar("AnyTrajectory", bound=Trajectory)


class GroupPlace(NamedTuple):
    """A group to be played. Example: GroupPlace("letters", {"id": "letters-1", "ask": "say 1 letters"})."""

    source: str  # key in rollout.sources, or "" without sources
    scenario: Json


def plan_groups(scenarios: Sequence[Json], *, step: int, group_size: int, prefix: str = "s") -> list[RolloutPlan]:
    """Like `plan_places`, without sources."""
    places = [GroupPlace("", scenario) for scenario in scenarios]
    return plan_places(places, step=step, group_size=group_size, prefix=prefix)


def plan_places(
    places: Sequence[GroupPlace], *, step: int, group_size: int, prefix: str = "s", temperature: float | None = None
) -> list[RolloutPlan]:
    """Returns all rollouts of a step, group by group. Ids depend only on the step and the position.

    Example: scenario 2 of step 3, attempt 5 -> group "s0003-g0002", trajectory "s0003-g0002-a05".
    """
    plans = []
    for number, (source, scenario) in enumerate(places):
        group_id = f"{prefix}{step:04d}-g{number:04d}"
        for index in range(group_size):
            plans.append(
                RolloutPlan(
                    trajectory_id=f"{group_id}-a{index:02d}",
                    group_id=group_id,
                    group_size=group_size,
                    index=index,
                    scenario=scenario,
                    step=step,
                    temperature=temperature,
                    source=source,
                )
            )
    return plans


def owed(plans: Sequence[RolloutPlan], done: Iterable[Trajectory]) -> list[RolloutPlan]:
    """Returns the plans without a finished trajectory."""
    finished = {trajectory.id for trajectory in done}
    return [plan for plan in plans if plan.trajectory_id not in finished]


def group(trajectories: Iterable[AnyTrajectory]) -> dict[str, list[AnyTrajectory]]:
    """Returns the complete groups, sorted by index. Repeated indices count once, with the last line.

    If a kill tore a group's scored lines, the whole group is judged and written again.
    """
    return {name: members for name, members in by_group(trajectories).items() if len(members) == members[0].group_size}


def first_groups(trajectories: Iterable[AnyTrajectory], num: int) -> list[AnyTrajectory]:
    """Returns the attempts of a step's first groups; earlier starts sometimes played more groups."""
    every = list(trajectories)
    ids = set(sorted({each.group_id for each in every})[:num])
    return [each for each in every if each.group_id in ids]


@dataclass
class GroupScorer:
    """Judges complete groups during play, and writes a group's scored lines as soon as it is judged.

    `add` takes trajectories, `finish` waits for verdicts. Groups in `scored` are not judged again. If the judge gives
    up on a group, the group is counted in `progress` and stays owed; it never gets a made-up reward.
    """

    judge: Judge
    writer: LineWriter
    shadows: ShadowJudges | None = None
    scored: dict[str, list[ScoredTrajectory]] = field(default_factory=dict)
    progress: JudgeProgress = field(default_factory=JudgeProgress)
    _waiting: dict[str, dict[int, Trajectory]] = field(default_factory=lambda: defaultdict(dict))
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> None:
        members = self._waiting[trajectory.group_id]
        members.setdefault(trajectory.index, trajectory)
        if len(members) == trajectory.group_size and trajectory.group_id not in self.scored:
            whole = [members[index] for index in sorted(members)]
            del self._waiting[trajectory.group_id]
            self._tasks.append(asyncio.get_running_loop().create_task(self._score(whole)))

    async def _score(self, whole: list[Trajectory]) -> None:
        group_id = whole[0].group_id
        shadows = asyncio.create_task(self.shadows.score(whole)) if self.shadows is not None else None
        try:
            scored = await self.progress.judge(self.judge, group_id, lambda: whole)
            if scored is not None and shadows is not None:
                beside = await shadows
                scored = [msgspec.structs.replace(each, shadow=beside.get(each.id, [])) for each in scored]
        finally:
            if shadows is not None:
                shadows.cancel()
        if scored is not None:
            await asyncio.to_thread(self.writer.append_all, scored)
            self.scored[group_id] = scored

    async def finish(self) -> None:
        """Waits for all verdicts, then raises the first unexpected error."""
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def cancel(self) -> None:
        """Cancels pending verdicts; their groups stay owed."""
        for task in self._tasks:
            task.cancel()
