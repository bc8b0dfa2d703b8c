"""Whole trajectories, read at indexed positions, and the learner's numbers for trained trajectories.

Unreadable lines are shown as errors. The learner's numbers are in step_0003/learned.jsonl, one line per trajectory.
"""

import contextlib
from functools import lru_cache
from pathlib import Path

import msgspec

from art_cli.runs.feedback import FEEDBACK_FILE, FeedbackEntry, latest
from art_cli.runs.json_lines import decode, lines, open_file
from art_cli.runs.trajectory import Json, ScoredTrajectory, score_trajectory
from art_cli.runtime.errors import DataError, printable
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.view.index import IndexedStep
from art_cli.view.rows import MAX_SHOWN, IndexRow

_ANY = msgspec.json.Decoder()
MAX_FILES = 64  # number of cached files
MAX_DEPTH = 100  # levels of nested JSON
MAX_NODES = 2_000_000  # brackets in a line; browsers cannot show more
_SCORED = msgspec.json.Decoder(ScoredTrajectory)


class _Named(msgspec.Struct):
    id: str = ""


_NAMED = msgspec.json.Decoder(_Named)


def learned_numbers(path: Path, trajectory: str, *, within: Path | None) -> Json:
    """Returns a trajectory's line of learned.jsonl, or {}."""
    try:
        place = _places(path, path.stat().st_size, within).get(trajectory)
        if place is None:
            return {}
        with open_file(path, within=within) as file:
            file.seek(place[0])
            found = decode(file.read(place[1]), _ANY)
    except (OSError, ValueError, DataError):
        return {}
    return found if isinstance(found, dict) else {}


def feedback_on(path: Path, trajectory: str, *, within: Path | None) -> list[Json]:
    """Returns the feedback that counts for a trajectory, from the feedback.jsonl next to its file."""
    file = path.with_name(FEEDBACK_FILE)
    try:
        entries = _feedback(file, file.stat().st_size, within).get(trajectory, [])
    except (OSError, DataError):
        return []
    shown = [(entry.metric, entry.value, entry.reply, entry.tags) for entry in entries]
    return [dict(zip(("metric", "value", "reply", "tags"), each, strict=True)) for each in shown]


@lru_cache(MAX_FILES)
def _feedback(path: Path, size: int, within: Path | None) -> dict[str, list[FeedbackEntry]]:
    return latest(path, within=within)


@lru_cache(MAX_FILES)
def _places(path: Path, size: int, within: Path | None) -> dict[str, tuple[int, int]]:
    """Returns id -> (offset, length) for the lines of a file, which is read again when its size changes."""
    found = {}
    for line in lines(path, within=within):
        with contextlib.suppress(ValueError):  # a torn or foreign line
            found[decode(line.data, _NAMED).id] = (line.offset, len(line.data))
    return found


def read_record(step: IndexedStep, row: IndexRow) -> ScoredTrajectory:
    """Returns the row's trajectory, with id, group and position from the index."""
    try:
        record = _read(step, row)
    except OSError as error:
        record = _unread(row, error.strerror or str(error))
    except (ValueError, RecursionError) as error:
        record = _unread(row, printable(error, limit=300))
    return msgspec.structs.replace(record, id=row.id, group_id=row.group, index=row.index)


def read_bytes(step: IndexedStep, row: IndexRow) -> bytes:
    """Returns a row's line. Raises ValueError if it is too long or was cut."""
    if row.length > MAX_SHOWN:
        raise ValueError(f"its line has {row.length >> 20} MiB; up to {MAX_SHOWN >> 20} MiB are shown")
    with step.open(step.path_of(row)) as file:
        file.seek(row.offset)
        line = file.read(row.length)
    if len(line) < row.length:
        raise ValueError("the file was cut while it was read")
    return line


def _read(step: IndexedStep, row: IndexRow) -> ScoredTrajectory:
    line = read_bytes(step, row)
    num_brackets = line.count(b"{") + line.count(b"[")
    if num_brackets > MAX_NODES:
        raise ValueError(f"its line has {num_brackets:,} brackets; up to {MAX_NODES:,} are shown")
    if row.kind == "own":
        record = decode(line, _SCORED)
        record.reward = row.reward  # the returned reward if the line is unscored
    else:
        record = _read_foreign(line, row)
    if num_brackets > MAX_DEPTH and is_deep([record.scenario, record.messages, record.metadata], MAX_DEPTH):
        raise ValueError(f"its JSON is nested more than {MAX_DEPTH} levels deep")
    return record


def _read_foreign(line: bytes, row: IndexRow) -> ScoredTrajectory:
    # imports the whole configuration, in half a second
    from art_cli.judges.files.judged_files import Group, read_line

    read = read_line(line, Group(row.group, row.kind, size=row.part + 1), row.index)
    trajectory = read[row.part] if row.kind == "art" else read[0]
    return score_trajectory(trajectory, row.reward)


def _unread(row: IndexRow, reason: str) -> ScoredTrajectory:
    return ScoredTrajectory(
        id=row.id, group_id=row.group, group_size=1, index=row.index, error=f"unreadable: {reason}", reward=row.reward
    )
