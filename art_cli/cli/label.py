"""`art label`: asks a person for the few comparisons that tell most about the judge of a scored file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from art_cli.cli import Json
from art_cli.runtime.errors import Interrupted, UsageError, printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from art_cli.judges.files.person_labels import Pair, PersonLabels, Verdict
    from art_cli.judges.files.run_labels import RunLabels
    from art_cli.judges.ruler.attempt_tree import Message

KEYS = "1 left is better   2 right is better   0 equal   s skip   u undo   a show all   q quit"
VERDICTS: "dict[str, Verdict]" = {
    **{"1": "left", "\x1b[D": "left", "2": "right", "\x1b[C": "right", "0": "equal", "=": "equal"},
    **{"s": "skip", "u": "undo"},
}
MIN_LINES = 5  # lines of an attempt that a low terminal shows, too


def run(
    scored: Annotated[Path, Argument(metavar="FILE|RUN", help="Scored trajectories.", show_default=False)],
    is_report: Annotated[bool, Option("--report", help="Only report on existing labels.")] = False,
    as_json: Json = False,
) -> None:
    """Compare attempts yourself, to measure the judge.

    Shows two attempts of one group side by side and waits for one key. The pairs are chosen so that few answers tell
    much. Each answer goes to labels.jsonl beside the file at once; run again, it goes on. At the end it prints the
    share of all pairs that the judge orders as you do, with its interval, how many more answers would narrow it to plus
    or minus 5 points, how often you agree with yourself, and the noise setting for the YAML. `art view FILE` asks the
    same on a page. --report and --json ask nothing.

    With a RUN it asks about pairs of all of its steps, and finds out whether the judge comes to agree with you less as
    the policy learns to please it. `art report RUN` shows that too.

    \b
    art label scored.jsonl
    art label scored.jsonl --report
    art label runs/mine
    """
    import msgspec

    from art_cli.judges.files.person_labels import PersonLabels
    from art_cli.judges.files.run_labels import RunLabels
    from art_cli.runs.run_dir import RunDir

    labels = RunLabels(RunDir(scored)) if scored.is_dir() else PersonLabels(scored)
    if not is_report and not as_json:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("art label asks at a terminal; here art view asks on a page, and --report asks nothing")
        try:
            _ask_all(labels)
        except (KeyboardInterrupt, EOFError):
            raise Interrupted(
                f"interrupted; each answer is in {labels.labels_path}; the same command goes on"
            ) from None
    report = labels.report()
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if as_json else "\n".join(report.lines()) + "\n")


def _ask_all(labels: "PersonLabels | RunLabels") -> None:
    """Asks until the person quits or every pair has its label."""
    from rich.console import Console

    console, key = Console(stderr=True, highlight=False), ""
    while (pair := labels.next()) is not None:
        _show(console, labels, pair, is_whole=key == "a")
        key = typer.getchar()  # forgets what was typed before, and raises KeyboardInterrupt for Ctrl-C
        if key == "q":
            return
        if key in VERDICTS:
            labels.answer(pair, VERDICTS[key])


def _show(console: "Console", labels: "PersonLabels | RunLabels", pair: "Pair", *, is_whole: bool) -> None:
    """Prints what both attempts begin with, then both side by side, cut to the terminal unless `is_whole`."""
    from os.path import commonprefix

    from rich.table import Table
    from rich.text import Text

    both = labels.load_messages(pair)
    shared: Sequence[Message] = commonprefix(both)
    table = Table.grid("", "", expand=True, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.ratio = 1
    table.add_row(*(Text(_text(each[len(shared) :]) or "(no more messages)") for each in both))
    room = None if is_whole else max(MIN_LINES, (console.height - 6) // 3)
    report = labels.report()
    console.rule(f"{report.num_labels} labels{f', about {report.num_needed} more' if report.num_needed else ''}")
    _print(console, Text(_text(shared)), room)
    _print(console, table, room and 2 * room)
    console.print(KEYS, markup=False)


def _print(console: "Console", part: "RenderableType", num_lines: int | None) -> None:
    from rich.segment import Segment, Segments

    lines = console.render_lines(part, pad=False)
    console.print(Segments([each for line in lines[:num_lines] for each in (*line, Segment.line())]), end="")
    if num_lines is not None and len(lines) > num_lines:
        console.print(f"... {len(lines) - num_lines} more lines; a shows all", style="dim", markup=False)


def _text(messages: "Sequence[Message]") -> str:
    """Returns messages as RULER's judge reads them; what could steer a terminal is escaped."""
    parts = [(message.role, segment) for message in messages for segment in message.segments]
    return printable_lines(
        "\n".join(f"{role if each.kind == 'text' else f'{role}, {each.kind}'}: {each.text}" for role, each in parts)
    )
