"""Import of other tools' traces (`art import`) and export of trajectories to other formats (`art generate`).

Each format has a module with a reader. `import_files` reads files in any of these formats, groups attempts at the same
scenario, and counts unreadable records.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from art_cli.formats import openai_log, openenv_traces
from art_cli.formats.imported_attempt import TraceReader
from art_cli.formats.inspect_eval import InspectSample
from art_cli.formats.langfuse_export import LangfuseExport
from art_cli.formats.openai_log import OpenAILog
from art_cli.formats.openenv_traces import OpenEnvTrace
from art_cli.formats.verifiers_traces import VerifiersTrace
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)


# Readers are tried in this order, from the most to the least specific.
READERS: Sequence[Callable[[], TraceReader]] = (OpenEnvTrace, VerifiersTrace, InspectSample, LangfuseExport, OpenAILog)
READ = tuple(reader().name for reader in READERS)
WRITERS: Mapping[str, Callable[[Trajectory], Json]] = {
    "openai": openai_log.record_of,
    "openenv": openenv_traces.record_of,
}


def write_traces(trajectories: Sequence[Trajectory], output: Path, form: str) -> None:
    """Writes the trajectories by group and index. Skips those that do not fit; raises DataError if none fits."""
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
        log.warning("%s: %d of %d attempts skipped: %s", output, len(problems), len(trajectories), problems[0])
    write_lines(output, records)
