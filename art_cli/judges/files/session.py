"""Session: judges a trajectory file. Determines the owed groups, judges them, and appends each finished group.

Reads a TrajectoryFile and appends to a ScoredFile, one process at a time. There is no other state: running the same
session again resumes it.

All lines of a group are written together. A kill can only tear the end of the scored file, and the torn end is removed
on reopening, so every group is present once or not at all. A file is only resumed if each line is a source trajectory
scored by this judge, because group names and ids alone do not identify a file.
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
from art_cli.runtime.errors import RunError, brief, printable

log = logging.getLogger(__name__)

_SCORED = msgspec.json.Decoder(ScoredTrajectory)
_CURES = "name another file with -o, or start over with --fresh (verdicts already paid for are kept in the cache)"
# Called with the number of initially owed groups and the current progress.
OnProgress = Callable[[int, JudgeProgress], None]


class ScoredFile:
    """A scored file opened for appending. `done` are its complete groups. `is_fresh` empties the file first.

    Raises RunError if another process uses the file, or if the lines come from other trajectories or a different judge.
    """

    def __init__(self, path: Path, source: TrajectoryFile, settings: str, *, is_fresh: bool = False) -> None:
        self.path, self._settings = path, settings
        self._writer = LineWriter(path, is_fresh=is_fresh)  # locks the file and removes a torn last line
        try:
            self.done = self._resume(source)
        except BaseException:
            self.close()
            raise

    def _resume(self, source: TrajectoryFile) -> set[str]:
        """Returns the complete groups and removes the lines of incomplete groups."""
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
            raise RunError(
                f"{self.path}: groups {names} are incomplete in the middle of the file; start over with --fresh"
            )
        self._writer.truncate(start)
        log.warning("%s: cut off %d incomplete groups at its end; they are judged again", self.path, len(torn))

    def append(self, group: Sequence[ScoredTrajectory]) -> None:
        """Writes all lines of a group together."""
        for trajectory in group:
            trajectory.judge_settings = self._settings
        self._writer.append_all(group)

    def check_place(self) -> None:
        """Raises RunError if the file was removed or replaced, because written lines are then lost."""
        if not self._writer.is_in_place():
            raise RunError(f"{self.path}: was removed or replaced while it was written; run the same command again")

    def close(self) -> None:
        self._writer.close()


def scored_groups(scored: TrajectoryFile, source: TrajectoryFile, settings: str) -> set[str]:
    """Returns the `source` groups that are complete in the scored file. Read-only.

    Raises RunError with the line number of any line that is not a `source` trajectory scored with `settings`.
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
    """Raises RunError for the first line that prevents resuming."""
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
    """Returns the reason why a line is not `expected` scored with these settings, if any."""
    name = brief(found.id)
    if expected is None or found.id != expected.id:
        return f"trajectory {name} is not in {source.path}"
    if not _is_same(found, expected):
        return f"trajectory {name} differs from the attempt with the same id in {source.path}"
    if found.error is not None:
        return None
    if found.reward is None:
        return "not scored: neither a reward nor an error"
    if _settings_of(found) != settings:
        return "judged with other settings (judge, model, rubric, function, weights, ...)"
    return None


def _is_same(scored: ScoredTrajectory, trajectory: Trajectory) -> bool:
    """Returns whether both are equal except for reward and scores."""
    try:
        expected = score_trajectory(
            trajectory, scored.reward, scored.scores, settings=scored.judge_settings, noise=scored.noise
        )
        return expected == scored
    except RecursionError:
        return False


def _settings_of(scored: ScoredTrajectory) -> str | None:
    """Returns the digest of the line's judge; lines of a run have it only in RULER's scores."""
    if scored.judge_settings is not None:
        return scored.judge_settings
    found = {score.settings for score in scored.scores}
    return found.pop() if len(found) == 1 else None


class Summary(msgspec.Struct, kw_only=True):
    """Results of a session. Plain numbers count groups."""

    scored: str  # path of the scored file
    groups: int  # scored by this session
    groups_before: int
    trajectories: int
    failed: int  # of these trajectories, those with an error, which get no reward
    mean: float | None  # mean reward over this session's scores
    calls: int
    cached_votes: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None  # cost of this session, if all prices are known
    owed: int
    owed_because: dict[str, str]  # group id -> reason
    incomplete: dict[str, str]  # group id -> "2 of 4 attempts"
    skipped: int  # groups with too few attempts to compare
    stopped: str | None  # reason for stopping early


class Session:
    """Judges a file once. Groups with fewer than `least` attempts are skipped."""

    def __init__(
        self, judge: Judge, source: TrajectoryFile, path: Path, *, is_partial: bool = False, least: int = 1
    ) -> None:
        self.judge, self.source, self.path, self.is_partial = judge, source, path, is_partial
        self.groups = judgeable(source, is_partial=is_partial, least=least)
        self.num_skipped = len(judgeable(source, is_partial=is_partial)) - len(self.groups)
        self.num_before = self.num_trajectories = self.num_failed = self.num_rewards = 0
        self.reward_sum = 0.0

    async def run(self, *, is_fresh: bool = False, progress: OnProgress | None = None) -> Summary:
        """Judges owed groups, or with `is_fresh` all groups. Cancellation drops groups in flight.

        Raises RunError if the output is in use, contains another file's or judge's scores, or was removed during the
        session.
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
        """Opens the output and compares it with the source. Reads both files, and possibly a reward model's files."""
        return ScoredFile(self.path, self.source, settings_of(self.judge), is_fresh=is_fresh)

    def _count(self, scored: Sequence[ScoredTrajectory]) -> None:
        rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
        self.num_trajectories += len(scored)
        self.num_failed += sum(trajectory.error is not None for trajectory in scored)
        self.num_rewards += len(rewards)
        self.reward_sum += sum(rewards)

    def _summary(self, done: JudgeProgress) -> Summary:
        usage = self.judge.usage
        waiting = [group for group in self.source if not group.is_complete and not self.is_partial]
        return Summary(
            scored=str(self.path),
            groups=done.num_scored,
            groups_before=self.num_before,
            trajectories=self.num_trajectories,
            failed=self.num_failed,
            mean=self.reward_sum / self.num_rewards if self.num_rewards else None,
            calls=usage.calls,
            cached_votes=self.judge.num_cached,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost_usd=usage.cost_usd,
            owed=len(self.groups) - self.num_before - done.num_scored,
            owed_because=done.owed,
            incomplete={group.group_id: f"{group.count} of {group.size} attempts" for group in waiting},
            stopped=done.stopped,
            skipped=self.num_skipped,
        )


def judgeable(source: TrajectoryFile, *, is_partial: bool, least: int = 1) -> list[Group]:
    """Returns the groups to judge with at least `least` attempts: complete groups, or with `is_partial` all groups."""
    return [group for group in source if (group.is_complete or is_partial) and group.count >= least]
