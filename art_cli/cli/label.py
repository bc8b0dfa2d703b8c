"""`art label`: asks a person for the most informative comparisons, to measure the judge."""

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
MIN_LINES = 5  # smallest number of lines per attempt


def run(
    scored: Annotated[Path, Argument(metavar="FILE|RUN", help="Scored trajectories.", show_default=False)],
    is_report: Annotated[bool, Option("--report", help="Only report on existing labels.")] = False,
    metric: Annotated[
        str | None, Option("--feedback", metavar="METRIC", help="Take the ratings of art gateway's clients as answers.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare attempts yourself, to measure the judge.

    Shows two attempts of a group side by side and waits for a key. It chooses the most informative pairs. Answers are
    saved in labels.jsonl next to FILE, and the same command resumes. At the end it prints how often the judge agrees
    with you (with an interval), how many answers an interval of 5 points needs, how often you agree with yourself, and
    judge.noise for the YAML. `art view FILE` asks on a page instead. --report and --json ask nothing.

    For a RUN, it asks about all steps, and measures whether agreement falls as the policy learns to please the judge.
    `art report RUN` prints this, too. --feedback asks nothing: it takes the ratings of art gateway's clients as answers
    (feedback.jsonl next to FILE).

    \b
    art label scored.jsonl
    art label scored.jsonl --report
    art label runs/mine/gateway/seen.scored.jsonl --feedback thumbs
    art label runs/mine
    """
    import msgspec

    from art_cli.judges.files.person_labels import PersonLabels
    from art_cli.judges.files.run_labels import RunLabels
    from art_cli.runs.run_dir import RunDir

    if metric is not None and is_report:
        raise UsageError("--feedback adds labels; leave out --report")
    labels = RunLabels(RunDir(scored)) if scored.is_dir() else PersonLabels(scored)
    if metric is not None:
        _answer_by_feedback(labels, scored, metric)
    elif not is_report and not as_json:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("art label asks at a terminal; here art view asks on a page, and --report asks nothing")
        try:
            _ask_all(labels)
        except (KeyboardInterrupt, EOFError):
            raise Interrupted(f"interrupted; answers are in {labels.labels_path}; the same command continues") from None
    report = labels.report()
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if as_json else "\n".join(report.lines()) + "\n")


def _answer_by_feedback(labels: "PersonLabels | RunLabels", scored: Path, metric: str) -> None:
    """Raises UsageError for a run, for a metric without ratings, and if no two attempts of a group were rated."""
    from art_cli.judges.files.person_labels import PersonLabels
    from art_cli.runs.feedback import FEEDBACK_FILE, latest, rating

    if not isinstance(labels, PersonLabels):
        raise UsageError("--feedback: name the scored file of conversations that art gateway recorded")
    ratings = {id: rating(entries, metric) for id, entries in latest(scored.parent).items()}
    known = {id: value for id, value in ratings.items() if value is not None}
    if not known:
        raise UsageError(f"--feedback: {scored.parent / FEEDBACK_FILE} has no rating of {metric!r}")
    if not labels.answer_by(known) and not labels.num_asked:
        raise UsageError(
            f"--feedback: {len(known)} attempts have {metric!r}, and no two of a group; nothing is compared"
        )


def _ask_all(labels: "PersonLabels | RunLabels") -> None:
    from rich.console import Console

    console, key = Console(stderr=True, highlight=False), ""
    while (pair := labels.next()) is not None:
        _show(console, labels, pair, is_whole=key == "a")
        key = typer.getchar()  # discards earlier input; raises KeyboardInterrupt for Ctrl-C
        if key == "q":
            return
        if key in VERDICTS:
            labels.answer(pair, VERDICTS[key])


def _show(console: "Console", labels: "PersonLabels | RunLabels", pair: "Pair", *, is_whole: bool) -> None:
    """Prints the common beginning and then both attempts, cut to the terminal unless `is_whole`."""
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
    """Returns the text that RULER's judge reads, without control characters."""
    parts = [(message.role, segment) for message in messages for segment in message.segments]
    return printable_lines(
        "\n".join(f"{role if each.kind == 'text' else f'{role}, {each.kind}'}: {each.text}" for role, each in parts)
    )
