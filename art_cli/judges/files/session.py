"""Judges a file into another: works out from both what is owed, judges it, and appends each group as it finishes.

Reads a TrajectoryFile, appends to a ScoredFile. There is no other state: the same session, run again, goes on.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from art_cli.judges import Judge, settings_of
from art_cli.judges.files.judged_files import Group, TrajectoryFile
from art_cli.judges.files.scored import ScoredFile
from art_cli.judges.judge_groups import JudgeProgress, judge_groups
from art_cli.runs.trajectory import ScoredTrajectory

# Called with the number of groups owed at the start, and what became of them so far.
OnProgress = Callable[[int, JudgeProgress], None]


class Summary(msgspec.Struct, kw_only=True):
    """The results of one session. Numbers without another noun count groups."""

    scored: str  # path of the scored file
    groups: int  # scored by this session
    groups_before: int
    trajectories: int
    mean: float | None  # mean reward of what this session scored
    calls: int
    cached_votes: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None  # cost of this session, or None if a price is unknown
    asked_again: int  # groups of this session that got further rounds of votes
    owed: int
    owed_because: dict[str, str]  # group id -> why it could not be scored
    incomplete: dict[str, str]  # group id -> how many of its attempts are there
    skipped: int  # groups with too few attempts for a judge that compares them
    stopped: str | None  # why no further group was begun


class Session:
    """One run of a judge over a file. Groups of fewer than `least` attempts are skipped."""

    def __init__(
        self, judge: Judge, source: TrajectoryFile, path: Path, *, is_partial: bool = False, least: int = 1
    ) -> None:
        self.judge, self.source, self.path, self.is_partial = judge, source, path, is_partial
        self.groups = judgeable(source, is_partial=is_partial, least=least)
        self.num_skipped = len(judgeable(source, is_partial=is_partial)) - len(self.groups)
        self.num_before = self.num_trajectories = self.num_rewards = self.num_asked_again = 0
        self.reward_sum = 0.0

    async def run(self, *, is_fresh: bool = False, progress: OnProgress | None = None) -> Summary:
        """Judges what is owed, or with `is_fresh` everything. When it is cancelled, groups in flight are dropped.

        Raises RunError if the output is in use, holds another file's or another judge's scores, or was removed
        meanwhile.
        """
        output = await asyncio.to_thread(self._open, is_fresh=is_fresh)
        try:
            owed = [group for group in self.groups if group.group_id not in output.done]
            self.num_before = len(self.groups) - len(owed)

            def keep(scored: Sequence[ScoredTrajectory]) -> None:
                output.append(scored)
                self._count(scored)

            def report(done: JudgeProgress) -> None:
                if progress is not None:
                    progress(len(owed), done)

            groups = ((group.group_id, partial(self.source.load, group)) for group in owed)
            done = await judge_groups(self.judge, groups, keep, in_flight=self.judge.in_flight, progress=report)
            output.check_place()
        finally:
            output.close()
        return self._summary(done)

    def _open(self, *, is_fresh: bool) -> ScoredFile:
        """Returns the output, compared with the source. This reads both files, and perhaps those of a reward model."""
        return ScoredFile(self.path, self.source, settings_of(self.judge), is_fresh=is_fresh)

    def _count(self, scored: Sequence[ScoredTrajectory]) -> None:
        rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
        self.num_trajectories += len(scored)
        self.num_rewards += len(rewards)
        self.reward_sum += sum(rewards)
        self.num_asked_again += any(trajectory.again is not None for trajectory in scored)

    def _summary(self, done: JudgeProgress) -> Summary:
        usage = self.judge.usage
        waiting = [group for group in self.source if not group.is_complete and not self.is_partial]
        return Summary(
            scored=str(self.path),
            groups=done.num_scored,
            groups_before=self.num_before,
            trajectories=self.num_trajectories,
            mean=self.reward_sum / self.num_rewards if self.num_rewards else None,
            calls=usage.calls,
            cached_votes=self.judge.num_cached,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost_usd=usage.cost_usd,
            asked_again=self.num_asked_again,
            owed=len(self.groups) - self.num_before - done.num_scored,
            owed_because=done.owed,
            incomplete={group.group_id: f"{group.count} of {group.size} attempts" for group in waiting},
            stopped=done.stopped,
            skipped=self.num_skipped,
        )


def judgeable(source: TrajectoryFile, *, is_partial: bool, least: int = 1) -> list[Group]:
    """Returns the groups that are judged, of at least `least` attempts: the complete ones, or with `is_partial` all."""
    return [group for group in source if (group.is_complete or is_partial) and group.count >= least]
