"""`art judge`: scores a file of trajectories by groups, and measures a judge.

It reads trajectories (art's, OpenPipe ART's, plain conversations) and appends scored groups; when run again, it judges
only missing groups. --report measures the judge on a scored file.
"""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from art_cli.cli import Gates, Json, Overrides, print_result
from art_cli.runtime.errors import DataError, UsageError


def run(
    trajectories: Annotated[Path, Argument(metavar="FILE", help="Trajectories.", show_default=False)],
    overrides: Overrides = None,
    output: Annotated[Path | None, Option("-o", "--output", metavar="FILE", help="Default: FILE.scored.jsonl.")] = None,
    model: Annotated[str | None, Option("--model", metavar="NAME", help="Sets judge.model.")] = None,
    rubric: Annotated[Path | None, Option("--rubric", metavar="FILE", help="Text file with criteria.")] = None,
    config: Annotated[Path | None, Option("--config", metavar="CONFIG", help="Use this configuration's judge.")] = None,
    group_by: Annotated[str | None, Option("--group-by", metavar="KEY", help="Groups plain conversations.")] = None,
    is_partial: Annotated[bool, Option("--partial", help="Also judge incomplete groups.")] = False,
    is_fresh: Annotated[bool, Option("--fresh", help="Start the output file over.")] = False,
    is_dry_run: Annotated[bool, Option("--dry-run", help="Only estimate the cost.")] = False,
    is_report: Annotated[bool, Option("--report", help="Measure how reliable the judge is.")] = False,
    gold: Annotated[
        str | None, Option("--gold", metavar="KEY", help="Reference: metrics.win, returned_reward.")
    ] = None,
    gates: Gates = None,
    is_probe: Annotated[bool, Option("--probe", help="Test the judge with manipulated attempts.")] = False,
    num_groups: Annotated[int | None, Option("--groups", metavar="N", min=1, help="With --probe; default: 30.")] = None,
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Score trajectories, or measure a judge.

    --probe measures the judge's biases: it changes one attempt of a group (padding, praise, emptying, ...), and prints
    how its score moves. It writes no scores, and needs 11 or 12 judgements per group.

    \b
    art judge trajectories.jsonl -o scored.jsonl --rubric rubric.txt
    art judge trajectories.jsonl judge=function judge.entry=judge.py:judge -o scored.jsonl
    art judge scored.jsonl --gold metrics.win --gate 'pairwise_accuracy>=0.8'
    art judge trajectories.jsonl --probe --gate 'num_biases<=0'
    """
    import msgspec

    from art_cli.cli.judging import as_text, choose_judge, dry_run, is_scored, judge_file, refuse_owed, report
    from art_cli.judges.files.judged_files import TrajectoryFile
    from art_cli.loop.evaluate import parse_gate
    from art_cli.runs.json_lines import require_file

    require_file(trajectories)
    if is_probe:
        from art_cli.cli.probing import probe_judge

        if output or gold or is_fresh or is_report or is_partial:
            raise UsageError("--probe writes no scores: leave out --output, --gold, --fresh, --partial and --report")
        loaded = choose_judge(config, overrides or [], model=model, rubric=rubric, beside=trajectories)
        source = TrajectoryFile(trajectories, group_by=group_by)
        probe_judge(
            loaded, source, num_groups or 30, is_dry_run=is_dry_run, html=html, gates=gates or [], as_json=as_json
        )
        return
    if num_groups:
        raise UsageError("--groups is for --probe; without it, all groups are judged")
    wants_report = bool(is_report or gold or gates or html)
    is_asked = any((output, config, overrides, model, rubric, group_by, is_fresh, is_dry_run, is_partial))
    if wants_report and not is_asked and is_scored(trajectories):
        report(trajectories, gold=gold, gates=gates or [], html=html, as_json=as_json)
        return
    output = output or trajectories.with_name(f"{trajectories.name.removesuffix('.jsonl')}.scored.jsonl")
    if output.resolve() == trajectories.resolve() or (output.exists() and output.samefile(trajectories)):
        raise UsageError(f"{trajectories}: input and output are the same file; name another one with -o")
    for gate in gates or []:
        parse_gate(gate)  # before paid calls
    loaded = choose_judge(config, overrides or [], model=model, rubric=rubric, beside=trajectories)
    source = TrajectoryFile(trajectories, group_by=group_by)
    if not source.groups:
        raise DataError("no group in it: nothing to judge", trajectories)
    if is_dry_run:
        dry_run(loaded, source, None if is_fresh else output, is_partial=is_partial, as_json=as_json)
        return
    summary = judge_file(loaded, source, output, is_partial=is_partial, is_fresh=is_fresh)
    before = msgspec.to_builtins(summary) if as_json else as_text(summary)
    has_groups = bool(summary.groups + summary.groups_before)
    if gates and not has_groups and not summary.owed:
        raise DataError("no group in it, so no gate can be checked", trajectories)
    if wants_report and has_groups:
        is_whole = not summary.owed
        report(output, gold=gold, gates=gates or [], html=html, as_json=as_json, before=before, is_whole=is_whole)
    else:
        print_result(before, f"{before}", as_json)
    refuse_owed(summary)
