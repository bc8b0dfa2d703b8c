"""Traces of other tools read into trajectories (`art import`), and trajectories written as theirs (`art generate`).

One file for each format recognises its records and reads attempts from them. `import_files` reads files of any of them,
puts attempts at the same scenario into groups, and counts what it could not read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from art_cli.formats import openai_log, openenv_traces
from art_cli.formats.imported_attempt import TracedAttempt
from art_cli.formats.inspect_eval import InspectSample
from art_cli.formats.langfuse_export import LangfuseExport
from art_cli.formats.openai_log import OpenAILog
from art_cli.formats.openenv_traces import OpenEnvTrace
from art_cli.formats.verifiers_traces import VerifiersTrace
from art_cli.runs.trajectory import Json, Trajectory


class TraceReader(Protocol):
    """Reads the records of one format, in the order of the files."""

    name: str  # the name that --from takes
    about: str  # one line for the help

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
