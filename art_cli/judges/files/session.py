"""Session: judges a file into another. It works out from both what is owed, judges it, and appends each finished group.

It reads a TrajectoryFile and appends to a ScoredFile, one process at a time. There is no other state: the same session,
run again, goes on.

A group's lines are written in one piece. A kill can tear only the end of the scored file, which is cut off when the
file is opened again, so that every group is in it once or not at all. A file is continued only if each of its lines is
a trajectory of the source, scored by this judge, because names of groups and ids alone do not tell two files apart.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from art_cli.judges import Judge, settings_of
from art_cli.judges.files.judged_files import Group, TrajectoryFile
from art_cli.judges.judge_groups import JudgeProgress, judge_groups
from art_cli.runs.durable import LineWriter
from art_cli.runs.json_lines import decode
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, score_trajectory
from art_cli.runtime.errors import RunError, printable

log = logging.getLogger(__name__)

_SCORED = msgspec.json.Decoder(ScoredTrajectory)
_CURES = "name another file with -o, or start anew with --fresh (verdicts already paid for are kept in the cache)"


class ScoredFile:
    """A file open for appending. `done` are the groups that it holds whole. `is_fresh` empties it first.

    Raises RunError if another process uses it, or it holds other trajectories or another judge's scores.
    """

    def __init__(self, path: Path, source: TrajectoryFile, settings: str, *, is_fresh: bool = False) -> None:
        self.path, self._settings = path, settings
        self._writer = LineWriter(path, is_fresh=is_fresh)  # locks the file and cuts off a torn last line
        try:
            self.done = self._resume(source)
        except BaseException:
            self.close()
            raise

    def _resume(self, source: TrajectoryFile) -> set[str]:
        """Returns the groups that the file holds whole; the lines of incomplete ones are cut off."""
        there = TrajectoryFile(self.path)
        whole = scored_groups(there, source, self._settings)
        torn = [group for group in there if group.group_id not in whole]
        if torn:
            self._cut_off(torn, [group for group in there if group.group_id in whole])
        return whole

    def _cut_off(self, torn: Sequence[Group], whole: Sequence[Group]) -> None:
        start = min(offset for group in torn for _, offset in group.lines.values())
        last = max((offset for group in whole for _, offset in group.lines.values()), default=-1)
        if last > start:
            names = ", ".join(printable(group.group_id) for group in torn[:3])
            raise RunError(f"{self.path}: groups {names} are incomplete in the middle of it; start anew with --fresh")
        self._writer.truncate(start)
        log.warning("%s: cut off %d incomplete groups at its end; they are judged again", self.path, len(torn))

    def append(self, group: Sequence[ScoredTrajectory]) -> None:
        """Writes all lines of a group at once."""
        for trajectory in group:
            trajectory.judge_settings = self._settings
        self._writer.append_all(group)

    def check_place(self) -> None:
        """Raises RunError if the file was removed or replaced, so that what was written is lost."""
        if not self._writer.is_in_place():
            raise RunError(f"{self.path}: was removed or replaced while it was written; run the same command again")

    def close(self) -> None:
        self._writer.close()


def scored_groups(scored: TrajectoryFile, source: TrajectoryFile, settings: str) -> set[str]:
    """Returns the groups of `source` that the scored file holds whole. Changes nothing.

    Raises RunError with the line: one that is not a trajectory of `source`, scored by the judge of `settings`.
    """
    path, whole = scored.path, set()
    for name, group in scored.groups.items():
        if name not in source.groups:
            shown = printable(repr(name))
            raise RunError(f"{path}:{group.first_line}: holds group {shown}, which {source.path} does not; {_CURES}")
        _check_group(path, group, source, settings)
        if group.count == source.groups[name].count:
            whole.add(name)
    return whole


def _check_group(path: Path, group: Group, source: TrajectoryFile, settings: str) -> None:
    """Raises RunError for the first line of a group with which the file cannot be continued."""
    expected = {trajectory.index: trajectory for trajectory in source.load(source.groups[group.group_id])}
    with path.open("rb") as file:
        for index, (number, offset) in sorted(group.lines.items()):
            file.seek(offset)
            try:
                found = decode(file.readline(), _SCORED)
            except ValueError as error:
                raise RunError(f"{path}:{number}: not a scored trajectory: {error}; {_CURES}") from error
            if wrong := _find_fault(found, expected.get(index), source, settings):
                raise RunError(f"{path}:{number}: {wrong}; {_CURES}")


def _find_fault(
    found: ScoredTrajectory, expected: Trajectory | None, source: TrajectoryFile, settings: str
) -> str | None:
    """Returns why a line of the output is not `expected`, scored with these settings, or None if it is."""
    name = printable(repr(found.id), limit=80)
    if expected is None or found.id != expected.id:
        return f"trajectory {name} is not in {source.path}"
    if not _is_same(found, expected):
        return f"trajectory {name} is another attempt than the one of that id in {source.path}"
    if found.error is not None:
        return None
    if found.reward is None:
        return "not scored: neither a reward nor an error"
    if _settings_of(found) != settings:
        return "judged with other settings (judge, model, rubric, function, weights, ...)"
    return None


def _is_same(scored: ScoredTrajectory, trajectory: Trajectory) -> bool:
    """Returns whether the two are equal in everything but reward and scores."""
    try:
        expected = score_trajectory(
            trajectory,
            scored.reward,
            scored.scores,
            settings=scored.judge_settings,
            noise=scored.noise,
            again=scored.again,
        )
        return expected == scored
    except RecursionError:
        return False


def _settings_of(scored: ScoredTrajectory) -> str | None:
    """Returns the digest of the judge that scored a line; older versions wrote it into RULER's scores only."""
    if scored.judge_settings is not None:
        return scored.judge_settings
    found = {score.settings for score in scored.scores}
    return found.pop() if len(found) == 1 else None


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
