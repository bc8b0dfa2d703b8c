"""`art judge --probe`: draws groups, probes the judge, prints a report, checks gates."""

import logging
import random
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import msgspec

from art_cli.cli import print_result
from art_cli.cli.judging import dollars, least
from art_cli.config.compose import LoadedJudge
from art_cli.judges import make_judge
from art_cli.judges.costs import CostEstimate
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.judges.files.session import judgeable
from art_cli.judges.judge_probe import Ask, anew, plan, probe, probe_lines
from art_cli.judges.trial import require_keys
from art_cli.loop.evaluate import parse_gate
from art_cli.reports.pages.report_page import facts_table, html_page
from art_cli.runs.durable import write_file
from art_cli.runtime import threads
from art_cli.runtime.errors import DataError, UsageError, printable

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 16  # judged attempts per group


def probe_judge(
    loaded: LoadedJudge,
    source: TrajectoryFile,
    num_groups: int,
    *,
    is_dry_run: bool,
    html: Path | None,
    gates: Sequence[str],
    as_json: bool,
) -> None:
    """Probes the judge, or prints the estimated cost. Raises GateError, and DataError without usable groups."""
    parsed, asks = [parse_gate(gate) for gate in gates], draw(loaded, source, num_groups)
    if is_dry_run:
        judge = make_judge(anew(loaded.config, 0), loaded.directory)
        total = sum((each for ask in asks if (each := judge.estimate(ask.group))), CostEstimate())
        plain = {"verdicts": len(asks), **msgspec.structs.asdict(total)}
        words = f"{len(asks)} verdicts: {total.calls} calls, about {total.prompt_tokens:,} tokens, {dollars(total.usd)}"
        print_result(plain, words, as_json)
        return
    require_keys(loaded.config, loaded.directory)
    with redirect_stdout(sys.stderr):  # a user's judge may print
        report = threads.run(probe(loaded.config, loaded.directory, asks))
    lines, values = probe_lines(report), report.values()
    if html is not None:
        write_file(html, html_page(f"Probe of a judge: {source.path}", [facts_table(lines)]).encode())
    text = "\n".join(printable(f"{name:26s} {value}") for name, value in lines)
    print_result({"report": msgspec.to_builtins(report), "values": values}, text, as_json)
    for gate in parsed:
        if gate.metric not in values:
            raise UsageError(f"--gate: no value {gate.metric!r}; there are {', '.join(sorted(values))}")
        gate.check(values[gate.metric])


def draw(loaded: LoadedJudge, source: TrajectoryFile, num_groups: int) -> list[Ask]:
    """Returns questions about random groups, without repeated conversations."""
    groups = judgeable(source, is_partial=True, least=least(loaded))
    random.Random(0).shuffle(groups)
    asks, seen = list[Ask](), set[str]()
    for group in groups:
        try:
            attempts = [each for each in source.load(group) if each.error is None][:MAX_ATTEMPTS]
            content = repr([each.messages for each in attempts])
            if len(attempts) >= least(loaded) and content not in seen:
                asks += [*plan(len(seen), attempts, loaded.config)]
                seen.add(content)
        except (DataError, RecursionError) as error:
            log.warning("%s: left out: %s", printable(group.group_id), printable(str(error)))
        if len(seen) == num_groups:
            break
    if not asks:
        raise DataError("no group that the judge can be asked about", source.path)
    return asks
