"""Traces of other tools read into trajectories (`art import`), and trajectories written as theirs (`art generate`).

One file for each format: how a record of it is recognised, and what it says of an attempt. `import_files` reads files
of any of them, puts attempts at the same scenario into groups, and says what it could not read.
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
        """Whether the record is of this format."""

    def read(self, record: Json, group: str | None) -> TracedAttempt | None:
        """The attempt of one record. None: it is part of one that `finish` gives.

        `group`: the scenario's id, whatever the record says; None: the record says it, or else the first question.
        Raises ValueError: the record cannot be read.
        """

    def finish(self) -> Iterator[TracedAttempt]:
        """The attempts that several records are parts of."""


# A record is tried in this order, because the last ones recognise less.
READERS: Sequence[Callable[[], TraceReader]] = (OpenEnvTrace, VerifiersTrace, InspectSample, LangfuseExport, OpenAILog)
READ = tuple(reader().name for reader in READERS)
WRITERS: Mapping[str, Callable[[Trajectory], Json]] = {
    "openai": openai_log.record_of,
    "openenv": openenv_traces.record_of,
}
