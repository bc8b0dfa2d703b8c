"""Judging for `art judge`: chooses the judge, scores a file, estimates cost, and reports on scored files."""

import contextlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from art_cli.cli import print_result
from art_cli.config.checks import ranks
from art_cli.config.compose import LoadedJudge, load_judge
from art_cli.config.schema import FeedbackJudgeConfig, RulerJudgeConfig
from art_cli.judges import Judge, make_judge, settings_of
from art_cli.judges.costs import CostEstimate
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.judges.files.session import Session, Summary, judgeable, scored_groups
from art_cli.judges.judge_groups import JudgeProgress
from art_cli.judges.trial import require_keys
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.references import check_judge
from art_cli.runs.feedback import FEEDBACK_FILE
from art_cli.runs.json_lines import decode, lines
from art_cli.runtime import threads
from art_cli.runtime.errors import DataError, GateError, JudgeError, UsageError, printable
from art_cli.runtime.log import Bar, shown_bar

SHOWN = 5  # printed unscored groups


def is_scored(path: Path) -> bool:
    """Returns True if the first line is a scored trajectory. Raises DataError unless the file is UTF-8."""
    for line in lines(path):
        with contextlib.suppress(ValueError):
            first = decode(line.data, msgspec.json.Decoder(dict[str, Any]))
            return "reward" in first and "group_size" in first
        return False
    return False


def report(
    path: Path,
    *,
    gold: str | None,
    gates: Sequence[str],
    html: Path | None,
    as_json: bool,
    before: str | dict[str, Any] = "",
    is_whole: bool = True,
) -> None:
    """Prints `before` and the report. Raises GateError, also while groups are unscored: the hardest may be missing."""
    from art_cli.judges.judge_report import make_report, report_lines
    from art_cli.loop.evaluate import parse_gate

    parsed = [parse_gate(gate) for gate in gates]
    measured, sample = make_report(path, gold=gold)
    lines, plain, values = report_lines(measured), msgspec.to_builtins(measured), measured.values()
    if html is not None:
        from art_cli.reports.pages.judge_page import judge_page
        from art_cli.runs.durable import write_file

        write_file(html, judge_page(plain, asdict(sample), lines).encode())
    summary = before if isinstance(before, dict) else {}
    text = "\n".join(printable(f"{name:26s} {value}".rstrip()) for name, value in lines)
    print_result({**summary, "report": plain, "values": values}, f"{before}{text}", as_json)
    for gate in parsed:
        if gate.metric not in values:
            why = "is --gold set?" if gold is None else f"{gold} is equal within every group, or missing"
            raise UsageError(f"--gate: no value {gate.metric!r} ({why}); there are {', '.join(sorted(values))}")
        if not is_whole:
            raise GateError(f"gate missed: {path}: groups stay owed")
        gate.check(values[gate.metric])


def choose_judge(
    config: Path | None,
    overrides: Sequence[str],
    *,
    model: str | None = None,
    rubric: Path | None = None,
    beside: Path | None = None,
) -> LoadedJudge:
    """Returns the configured judge. `model` and `rubric` select RULER, which is also the default.

    Without a file, the judge `feedback` reads the feedback in the directory of the trajectories `beside`. Raises
    ConfigError if the judge names something that is missing.
    """
    is_named = any(override.partition("=")[0] in ("judge", "judge.name") for override in overrides)
    if config is None and not is_named:
        overrides = ["judge=ruler", *overrides]
    if (model is not None or rubric is not None) and not is_named:
        others = [override for override in overrides if not override.startswith("judge.")]
        if not isinstance(load_judge(config, others).config, RulerJudgeConfig):
            overrides = ["judge=ruler", *overrides]
    loaded = load_judge(config, overrides)
    if isinstance(loaded.config, FeedbackJudgeConfig) and loaded.config.file is None and beside is not None:
        found = beside.resolve().parent / FEEDBACK_FILE
        loaded = LoadedJudge(loaded.config.model_copy(update={"file": found}), loaded.directory)
    if model is not None or rubric is not None:
        if not isinstance(loaded.config, RulerJudgeConfig):
            raise UsageError(f"--model and --rubric are for judge=ruler, not judge={loaded.config.name}")
        if model is not None and loaded.config.panel:
            raise UsageError("--model: the judge is a panel of several models; change judge.panel instead")
        chosen: dict[str, Any] = {} if model is None else {"model": model}
        if rubric is not None:
            chosen["rubric"] = rubric.resolve()
        loaded = LoadedJudge(loaded.config.model_copy(update=chosen), loaded.directory)
    check_judge(loaded)
    return loaded


def judge_file(
    loaded: LoadedJudge, source: TrajectoryFile, output: Path, *, is_partial: bool, is_fresh: bool
) -> Summary:
    """Judges the file. Raises UsageError for a missing API key, and Interrupted after saving complete groups."""
    require_keys(loaded.config, loaded.directory)
    interrupts = Interrupts(f"interrupted; what is scored is in {output}; the same command continues with the rest")

    async def judge() -> Summary:
        made = make_judge(loaded.config, loaded.directory, job=str(output.resolve()))
        try:
            with interrupts.handled(), shown_bar("judging") as bar:
                session = Session(made, source, output, is_partial=is_partial, least=least(loaded))
                return await session.run(is_fresh=is_fresh, progress=partial(_show, made, bar) if bar else None)
        finally:
            await made.close()

    with interrupts.explained(), redirect_stdout(sys.stderr):  # stdout is for the summary; a user's judge may print
        return threads.run(judge())


def least(loaded: LoadedJudge) -> int:
    """Returns the smallest group size for the judge. Feedback scores a single attempt without the other judge."""
    return 2 if ranks(loaded.config) and not isinstance(loaded.config, FeedbackJudgeConfig) else 1


def _show(judge: Judge, bar: Bar, total: int, done: JudgeProgress) -> None:
    words = [dollars(judge.usage.cost_usd), f"{judge.usage.tokens:,} tokens"]
    words += [f"{judge.num_cached} cached"] if judge.num_cached else []
    words += [f"{len(done.owed)} owed"] if done.owed else []
    bar(done.num_scored + len(done.owed), total, ", ".join(words))


def as_text(summary: Summary) -> str:
    mean = "no reward" if summary.mean is None else f"mean reward {summary.mean:.3f}"
    mean += f"; {summary.failed} of {summary.trajectories} attempts failed" if summary.failed else ""
    before = f" ({summary.groups_before} were before)" if summary.groups_before else ""
    lines = [f"{printable(summary.scored)}: {summary.groups} group{'s' * (summary.groups != 1)} scored{before}, {mean}"]
    if summary.calls or summary.cached_votes:
        tokens = summary.prompt_tokens + summary.completion_tokens
        paid = f"{summary.calls} calls, {tokens:,} tokens, {dollars(summary.cost_usd)}"
        lines.append(f"  {paid}; {summary.cached_votes} votes from the cache")
    if summary.skipped:
        lines.append(f"  {summary.skipped} groups skipped: a single attempt cannot be compared")
    owed = [item for item in summary.owed_because.items() if item[1] != summary.stopped]
    for group_id, reason in owed[:SHOWN]:
        lines.append(f"  owed: {printable(group_id)}: {printable(reason, limit=1000)}")
    for group_id, reason in list(summary.incomplete.items())[:SHOWN]:
        lines.append(f"  incomplete: {printable(group_id)}: {reason} (--partial judges them as they are)")
    return "\n".join(lines) + "\n"


def dollars(usd: float | None) -> str:
    """Example: "$0.0123"."""
    return "price unknown" if usd is None else f"${usd:.4f}"


def refuse_owed(summary: Summary) -> None:
    """Raises JudgeError if groups were not scored, if all groups were skipped, or if every attempt failed."""
    found = (summary.owed, "not scored and still owed"), (len(summary.incomplete), "incomplete")
    reasons = [f"{num} group{'s' * (num > 1)} {state}" for num, state in found if num]
    if not reasons and summary.skipped and not summary.groups + summary.groups_before:
        raise JudgeError(
            f"no group has two attempts to compare, of {summary.skipped}; play several at each scenario "
            "(rollout.group_size), or take a judge that scores single attempts"
        )
    if not reasons and summary.groups and not summary.groups_before and summary.failed == summary.trajectories:
        raise JudgeError("every attempt failed, so the judge saw none; `art view` shows their errors")
    if not reasons:
        return
    why = summary.stopped or next(iter(summary.owed_because.values()), None)
    because = f" ({printable(why, limit=1000)})" if why else ""
    raise JudgeError(f"{'; '.join(reasons)}{because}; the same command judges them again")


def dry_run(
    loaded: LoadedJudge, source: TrajectoryFile, output: Path | None, *, is_partial: bool, as_json: bool
) -> None:
    judge = make_judge(loaded.config, loaded.directory)
    if judge.estimate([]) is None:
        raise UsageError(f"--dry-run: judge={loaded.config.name} makes no calls that could be counted beforehand")
    done: set[str] = set()
    if output is not None and output.exists():
        done = scored_groups(TrajectoryFile(output), source, settings_of(judge))
    groups = judgeable(source, is_partial=is_partial, least=least(loaded))
    owed = [group for group in groups if group.group_id not in done]
    total = CostEstimate()
    for group in owed:
        try:
            attempts = [trajectory for trajectory in source.load(group) if trajectory.error is None]
            total += judge.estimate(attempts) or CostEstimate()
        except RecursionError as error:
            raise DataError("JSON is nested too deeply", source.path, group.first_line) from error
    threads.run(judge.close())
    price = "price unknown" if total.usd is None else f"about ${total.usd:.4f} plus the model's thoughts"
    text = (
        f"{len(owed)} groups to judge: {total.calls} calls ({total.cached} votes are in the cache), "
        f"about {total.prompt_tokens:,} tokens in and {total.completion_tokens:,} out, {price}"
    )
    print_result({"groups": len(owed), **msgspec.structs.asdict(total)}, text, as_json)
