"""A progress bar for the learner's work on a terminal; elsewhere the line of the finished step has to do."""

import contextlib
import sys
from collections.abc import Iterator

from art_cli.learners import Progress


@contextlib.contextmanager
def shown_updates(title: str) -> Iterator[Progress | None]:
    """Yields the function that the learner calls with (done, total); None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
