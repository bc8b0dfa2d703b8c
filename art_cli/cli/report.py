"""`art report`: a run's history and next ideas, as text, JSON or a static page."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from art_cli.cli import Json, Junit, Link, Markdown, records, write
from art_cli.runtime.errors import RunError, UsageError


def run(
    run: Annotated[str, Argument(metavar="RUN", help="A run directory.", show_default=False)],
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Also write a page.")] = None,
    has_conversation: Annotated[bool, Option("--conversation", help="Compare one conversation.")] = False,
    junit: Junit = None,
    markdown: Markdown = None,
    link: Link = None,
    as_json: Json = False,
) -> None:
    """Report what happened in a run, and what to try.

    \b
    Prints evaluations with intervals, best and last checkpoint, curves (reward, signal, entropy, clipping, gradients,
    lengths), failures, time, cost per point of reward, and findings. Works for running, killed and finished runs. Exit
    code 1 if the run learned nothing: every attempt failed, no attempt called the model, or no group had signal.

    \b
    art report runs/mine
    art report runs/mine --html report.html
    art report runs/mine --conversation
    art report runs/mine --junit report.xml --markdown report.md      for a CI job (docs/eval.md)
    art report s3://bucket/prefix/mine
    art report runs/mine --json | jq '.findings[] | {step, text}'
    """
    import msgspec

    from art_cli.reports.pages import ci_files
    from art_cli.reports.run_report import read_report
    from art_cli.runs.durable import write_file
    from art_cli.runs.run_dir import RunDir

    if as_json and has_conversation:
        raise UsageError("--json and --conversation: one at a time")
    root = records(run)
    plain = msgspec.to_builtins(read_report(RunDir(root)))
    if "://" in run:  # paths in the report refer to the store, not to the local copy
        here, there = (json.dumps(each)[1:-1] for each in (str(root), run.rstrip("/")))
        plain = json.loads(json.dumps(plain).replace(here, there))
    if html is not None:
        from art_cli.reports.pages.report_page import report_page

        write_file(html, report_page(plain).encode(errors="replace"))
    if junit is not None:
        kept = [each for each in (plain["best"], plain["last"]) if each is not None]
        digests = {f"{run}, step {each['step']}": each["digest"] for each in kept}
        write_file(junit, ci_files.junit("art report", ci_files.report_cases(plain), digests))
    if markdown is not None:
        write_file(markdown, ci_files.report_markdown(plain, link=link).encode())
    if as_json:
        write(json.dumps(plain))
    elif has_conversation:
        from art_cli.reports.before_after import read_before_after
        from art_cli.reports.pages.conversation_text import conversation_text

        write(conversation_text(read_before_after(RunDir(root)), plain))
    else:
        from art_cli.reports.pages.report_text import report_text

        write(report_text(plain))
    if plain["fault"]:
        raise RunError(f"{run}: {plain['fault']}")
