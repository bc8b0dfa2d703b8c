"""Writes trajectories as traces of another tool: one JSON line each."""

import logging
from collections.abc import Sequence
from pathlib import Path

from art_cli.formats import WRITERS
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)


def write_traces(trajectories: Sequence[Trajectory], output: Path, form: str) -> None:
    """Writes `output` whole, group by group, in the order of the indexes.

    A trajectory that the format cannot hold is left out with a warning. Raises DataError if it can hold none.
    """
    groups = {trajectory.group_id: number for number, trajectory in enumerate(trajectories)}
    records: list[Json] = []
    problems: list[str] = []
    for trajectory in sorted(trajectories, key=lambda each: (groups[each.group_id], each.index)):
        try:
            records.append(WRITERS[form](trajectory))
        except ValueError as error:
            problems.append(str(error))
    if not records:
        raise DataError(f"none of {len(trajectories)} attempts can be written as {form}: {problems[0]}", output)
    if problems:
        log.warning("%s: %d of %d attempts left out: %s", output, len(problems), len(trajectories), problems[0])
    write_lines(output, records)
