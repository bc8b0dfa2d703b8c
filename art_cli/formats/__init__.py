"""Traces of other tools read into trajectories (`art import`), and trajectories written as theirs (`art generate`).

One file for each format recognises its records and reads attempts from them. `import_files` reads files of any of them,
puts attempts at the same scenario into groups, and counts what it could not read.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from art_cli.formats import openai_log, openenv_traces
from art_cli.formats.imported_attempt import TracedAttempt
from art_cli.formats.inspect_eval import InspectSample
from art_cli.formats.langfuse_export import LangfuseExport
from art_cli.formats.openai_log import OpenAILog
from art_cli.formats.openenv_traces import OpenEnvTrace
from art_cli.formats.verifiers_traces import VerifiersTrace
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)


class TraceReader(Protocol):
    """Reads the records of one format, in the order of the files."""

    name: str  # the name that --from takes
    about: str  # one line for the help
    joins: bool  # whether an attempt may be several records

    @staticmethod
    def recognises(record: Json) -> bool:
        """Returns whether the record is of this format."""

    def read(self, record: Json, group: str | None) -> TracedAttempt | None:
        """Returns the attempt of one record, or None if it is part of one that `finish` gives.

        `group` is the scenario's id, or None if it is taken from the record or its first question. Raises ValueError if
        the record cannot be read.
        """

    def finish(self) -> Iterator[TracedAttempt]:
        """Yields the attempts that several records are parts of."""


# A record is tried in this order, because the last ones recognise less.
READERS: Sequence[Callable[[], TraceReader]] = (OpenEnvTrace, VerifiersTrace, InspectSample, LangfuseExport, OpenAILog)
READ = tuple(reader().name for reader in READERS)
WRITERS: Mapping[str, Callable[[Trajectory], Json]] = {
    "openai": openai_log.record_of,
    "openenv": openenv_traces.record_of,
}


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
