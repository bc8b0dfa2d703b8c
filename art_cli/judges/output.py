"""The scored file while it is written: what it holds already, and groups appended whole. One process at a time.

A group's lines are written in one piece. What a kill tore is at the end of the file and is cut off when it is opened
again, so that every group stands there once or not at all.
"""

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from art_cli import private
from art_cli.errors import RunError
from art_cli.judges.files import Group, TrajectoryFile
from art_cli.run_dir import LineWriter
from art_cli.trajectory import ScoredTrajectory

log = logging.getLogger(__name__)


class _ScoreHead(msgspec.Struct):
    settings: str | None = None


class _ScoredHead(msgspec.Struct):
    """As much of a scored line as says whether its judge was this one."""

    scores: list[_ScoreHead] = []


class ScoredFile:
    """Open for appending; `done` are the groups it holds whole.

    Raises RunError: in use, or made from another file or by a judge with other settings.
    """

    def __init__(self, path: Path, source: TrajectoryFile, settings: frozenset[str]) -> None:
        self.path, self._settings = path, settings
        private.make_directory(path.parent)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, private.FILE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunError(
                f"{path}: another process is writing it; wait for it, or name another file with -o"
            ) from None
        self._writer = LineWriter(path)  # cuts off a torn last line
        try:
            self.done = self._resume(source)
        except BaseException:
            self.close()
            raise

    def _resume(self, source: TrajectoryFile) -> set[str]:
        """The groups that are there whole; of one that is not, the lines are taken out again."""
        there = TrajectoryFile(self.path).groups
        whole = {name for name, group in there.items() if name in source.groups and _is_whole(group, source)}
        for name, group in there.items():
            if name not in source.groups:
                raise RunError(f"{self.path}: holds group {name!r}, which {source.path} does not; name another -o")
            self._check_settings(group)
        torn = [group for name, group in there.items() if name not in whole]
        if torn:
            self._cut_off(torn, [group for name, group in there.items() if name in whole])
        return whole

    def _check_settings(self, group: Group) -> None:
        with self.path.open("rb") as file:
            for number, offset in group.lines.values():
                file.seek(offset)
                head = msgspec.json.decode(file.readline(), type=_ScoredHead)
                found = {score.settings for score in head.scores if score.settings}
                if not found <= self._settings:
                    raise RunError(
                        f"{self.path}:{number}: judged with other settings (model, rubric, votes, ...); name another "
                        "file with -o, or start anew with --fresh (verdicts already paid for are kept in the cache)"
                    )

    def _cut_off(self, torn: Sequence[Group], whole: Sequence[Group]) -> None:
        start = min(offset for group in torn for _, offset in group.lines.values())
        last = max((offset for group in whole for _, offset in group.lines.values()), default=-1)
        if last > start:
            names = ", ".join(group.group_id for group in torn[:3])
            raise RunError(f"{self.path}: groups {names} are incomplete in the middle of it; start anew with --fresh")
        os.ftruncate(self._lock, start)
        log.warning("%s: cut off %d incomplete groups at its end; they are judged again", self.path, len(torn))

    def append(self, group: Sequence[ScoredTrajectory]) -> None:
        """All lines of a group, in one write."""
        self._writer.append_all(group)

    def close(self) -> None:
        self._writer.close()
        os.close(self._lock)


def _is_whole(group: Group, source: TrajectoryFile) -> bool:
    return group.count == source.groups[group.group_id].count
