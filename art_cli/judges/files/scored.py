"""The scored file while it is written: its present groups, and others appended whole. One process at a time.

A group's lines are written in one piece. A kill can tear only the end of the file, which is cut off when the file is
opened again, so that every group is in it once or not at all. A file is continued only if each of its lines is a
trajectory of the source, scored by this judge, because names of groups and ids alone do not tell two files apart.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from art_cli.judges.files.judged_files import Group, TrajectoryFile
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
