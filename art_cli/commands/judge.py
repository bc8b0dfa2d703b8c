"""`art judge`: scores a file of trajectories group by group, and says how far its judge can be trusted.

Reads trajectories (ours, ART's, plain conversations), appends scored trajectories as groups finish. Run again, it goes
on with the groups that are owed. With --report it measures the judge on the scored file.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.compose import LoadedJudge, load_judge
from art_cli.config.schema import RulerJudgeConfig
from art_cli.errors import GateError, Interrupted, JudgeError, UsageError
from art_cli.judges import Judge, make_judge
from art_cli.judges.files import Group, TrajectoryFile
from art_cli.judges.output import ScoredFile
from art_cli.judges.pipeline import Tally, judge_groups
from art_cli.judges.spending import settings_of, usage_of
from art_cli.trajectory import Trajectory

IN_FLIGHT = 16  # groups at once for a judge that makes no calls
SHOWN = 5  # owed groups that are named


@dataclass(frozen=True)
class Options:
    """The command line's, but for what decides the judge."""

    trajectories: Path
    output: Path
    group_by: str | None = None
    is_partial: bool = False
    is_fresh: bool = False
    is_dry_run: bool = False
    as_json: bool = False
    is_report: bool = False
    gold: str | None = None
    gates: Sequence[str] = ()
    html: Path | None = None


def run(
    *,
    trajectories: Path,
    overrides: Sequence[str],
    output: Path | None = None,
    config: Path | None = None,
    model: str | None = None,
    rubric: Path | None = None,
    **options: Any,
) -> None:
    """Writes `output` (scored.jsonl beside the trajectories). Raises JudgeError when groups stay owed, GateError."""
    chosen = Options(trajectories, output or trajectories.with_name("scored.jsonl"), **options)
    if _wants_report(chosen) and _is_scored(trajectories):
        _report(chosen, trajectories, {})
        return
    if chosen.output.resolve() == trajectories.resolve():
        raise UsageError(f"{trajectories}: input and output are the same file; name another one with -o")
    loaded = choose_judge(config, overrides, model=model, rubric=rubric)
    source = TrajectoryFile(trajectories, group_by=chosen.group_by)
    groups = [group for group in source if group.is_complete or chosen.is_partial]
    if chosen.is_dry_run:
        _dry_run(chosen, loaded, source, groups)
        return
    if chosen.is_fresh:
        chosen.output.unlink(missing_ok=True)
    summary = Session(chosen, loaded, source, groups).run()
    if _wants_report(chosen) and summary["groups"] + summary["groups_before"]:
        _report(chosen, chosen.output, summary, is_partial=bool(summary["owed"]))
    else:
        sys.stdout.write(json.dumps(summary) + "\n" if chosen.as_json else _as_text(summary))
    _refuse_owed(summary)


def choose_judge(
    config: Path | None, overrides: Sequence[str], *, model: str | None = None, rubric: Path | None = None
) -> LoadedJudge:
    """The configuration's judge, or RULER where none is named; `model` and `rubric` mean RULER too."""
    is_named = any(override.partition("=")[0] in ("judge", "judge.name") for override in overrides)
    if config is None and not is_named:
        overrides = ["judge=ruler", *overrides]
    if (model is not None or rubric is not None) and not is_named:
        others = [override for override in overrides if not override.startswith("judge.")]
        if not isinstance(load_judge(config, others).config, RulerJudgeConfig):
            overrides = ["judge=ruler", *overrides]
    loaded = load_judge(config, overrides)
    if model is None and rubric is None:
        return loaded
    if not isinstance(loaded.config, RulerJudgeConfig):
        raise UsageError(f"--model and --rubric are for judge=ruler, not judge={loaded.config.name}")
    if model is not None and loaded.config.panel:
        raise UsageError("--model: the judge is a panel of several models; change judge.panel instead")
    chosen: dict[str, Any] = {} if model is None else {"model": model}
    if rubric is not None:
        chosen["rubric"] = rubric.resolve()
    return LoadedJudge(loaded.config.model_copy(update=chosen), loaded.directory)


class Session:
    """One run of the judge over the groups that the output does not hold yet."""

    def __init__(self, options: Options, loaded: LoadedJudge, source: TrajectoryFile, groups: Sequence[Group]) -> None:
        self.options, self.loaded, self.source, self.groups = options, loaded, source, groups
        self.num_before = self.num_trajectories = 0
        self.reward_sum, self.num_rewards = 0.0, 0

    def run(self) -> dict[str, Any]:
        """What came of it, in numbers. Raises Interrupted, with everything complete on disk."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self._run())

    async def _run(self) -> dict[str, Any]:
        judge = make_judge(self.loaded.config, self.loaded.directory, job=str(self.options.output.resolve()))
        try:
            output = ScoredFile(self.options.output, self.source, settings_of(judge))
            try:
                tally = await self._judge(judge, output)
            finally:
                output.close()
            return self._summary(judge, tally)
        finally:
            await judge.close()

    async def _judge(self, judge: Judge, output: ScoredFile) -> Tally:
        owed = [group for group in self.groups if group.group_id not in output.done]
        self.num_before = len(self.groups) - len(owed)

        def keep(scored: Sequence[Any]) -> None:
            output.append(scored)
            rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
            self.num_trajectories += len(scored)
            self.num_rewards += len(rewards)
            self.reward_sum += sum(rewards)

        with _interruptible(), _progress(len(owed), judge) as progress:
            try:
                return await judge_groups(
                    judge, self._load(owed), keep, in_flight=_in_flight(self.loaded), progress=progress
                )
            except asyncio.CancelledError:
                raise Interrupted(
                    f"interrupted; what is scored is in {self.options.output}; the same command goes on with the rest"
                ) from None

    def _load(self, groups: Sequence[Group]) -> Iterator[list[Trajectory]]:
        for group in groups:
            yield self.source.load(group)

    def _summary(self, judge: Judge, tally: Tally) -> dict[str, Any]:
        usage, num_cached = usage_of(judge)
        incomplete = [group for group in self.source if not group.is_complete and not self.options.is_partial]
        num_owed = len(self.groups) - self.num_before - tally.num_scored
        return {
            "scored": str(self.options.output),
            "groups": tally.num_scored,
            "groups_before": self.num_before,
            "trajectories": self.num_trajectories,
            "mean": self.reward_sum / self.num_rewards if self.num_rewards else None,
            "calls": usage.calls,
            "cached_votes": num_cached,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost_usd": usage.cost_usd,
            "owed": num_owed,
            "owed_because": tally.owed,
            "incomplete": {group.group_id: f"{group.count} of {group.size} attempts" for group in incomplete},
            "stopped": tally.stopped,
        }


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        return None
    return uvloop.new_event_loop


def _in_flight(loaded: LoadedJudge) -> int:
    """Groups at once: enough that every call has its place while other groups are read and written."""
    return loaded.config.concurrency + 8 if isinstance(loaded.config, RulerJudgeConfig) else IN_FLIGHT


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM cancel the task that is inside."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _progress(total: int, judge: Judge) -> Iterator[Callable[[Tally], None] | None]:
    """A bar with what was spent, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty() or not total:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("judging"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[spent]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, spent="")

        def update(tally: Tally) -> None:
            usage, num_cached = usage_of(judge)
            words = [_dollars(usage.cost_usd), f"{usage.tokens:,} tokens"]
            words += [f"{num_cached} cached"] if num_cached else []
            words += [f"{len(tally.owed)} owed"] if tally.owed else []
            bar.update(task, completed=tally.num_scored + len(tally.owed), spent=", ".join(words))

        yield update


def _as_text(summary: dict[str, Any]) -> str:
    mean = "no reward" if summary["mean"] is None else f"mean reward {summary['mean']:.3f}"
    before = f" ({summary['groups_before']} were before)" if summary["groups_before"] else ""
    lines = [f"{summary['scored']}: {summary['groups']} groups scored{before}, {mean}"]
    if summary["calls"] or summary["cached_votes"]:
        tokens = summary["prompt_tokens"] + summary["completion_tokens"]
        lines.append(
            f"  {summary['calls']} calls, {tokens:,} tokens, {_dollars(summary['cost_usd'])}; "
            f"{summary['cached_votes']} votes from the cache"
        )
    owed = [item for item in summary["owed_because"].items() if item[1] != summary["stopped"]]
    for group_id, reason in owed[:SHOWN]:
        lines.append(f"  owed: {group_id}: {reason}")
    for group_id, reason in list(summary["incomplete"].items())[:SHOWN]:
        lines.append(f"  incomplete: {group_id}: {reason} (--partial judges them as they are)")
    return "\n".join(lines) + "\n"


def _dollars(usd: float | None) -> str:
    return "price unknown" if usd is None else f"${usd:.4f}"


def _refuse_owed(summary: dict[str, Any]) -> None:
    """Raises JudgeError when something in the file was not scored."""
    reasons = [f"{summary['owed']} groups were not scored and stay owed"] if summary["owed"] else []
    reasons += [f"{len(summary['incomplete'])} groups are incomplete"] if summary["incomplete"] else []
    if not reasons:
        return
    why = summary["stopped"] or next(iter(summary["owed_because"].values()), None)
    raise JudgeError(f"{'; '.join(reasons)}{f' ({why})' if why else ''}; the same command goes on with them")


def _dry_run(options: Options, loaded: LoadedJudge, source: TrajectoryFile, groups: Sequence[Group]) -> None:
    """Prints what judging would take; no call is made and nothing is written."""
    from art_cli.judges.estimate import Estimate, estimate
    from art_cli.judges.ruler import RulerJudge

    judge = make_judge(loaded.config, loaded.directory)
    if not isinstance(judge, RulerJudge):
        raise UsageError(f"--dry-run: judge={loaded.config.name} makes no calls that could be counted beforehand")
    done = TrajectoryFile(options.output).groups if options.output.exists() and not options.is_fresh else {}
    owed = [group for group in groups if group.group_id not in done]
    total = Estimate()
    for group in owed:
        total += estimate(judge, [trajectory for trajectory in source.load(group) if trajectory.error is None])
    asyncio.run(judge.close())
    if options.as_json:
        sys.stdout.write(json.dumps({"groups": len(owed), **asdict(total)}) + "\n")
        return
    price = "price unknown" if total.usd is None else f"about ${total.usd:.4f} and what the model thinks besides"
    sys.stdout.write(
        f"{len(owed)} groups to judge: {total.calls} calls ({total.cached} votes are in the cache), "
        f"about {total.prompt_tokens:,} tokens in and {total.completion_tokens:,} out, {price}\n"
    )


# --- the report -------------------------------------------------------------------------------------------------------


def _wants_report(options: Options) -> bool:
    return bool(options.is_report or options.gold or options.gates or options.html)


def _is_scored(path: Path) -> bool:
    """Whether the first line is a scored trajectory."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline() or b"{}")
        except ValueError:
            return False
    return isinstance(first, dict) and "reward" in first and "group_size" in first


def _report(options: Options, path: Path, summary: dict[str, Any], *, is_partial: bool = False) -> None:
    """Prints the report, writes the page, and raises GateError where a gate is missed."""
    from art_cli.judges.report import make_report
    from art_cli.judges.report_text import report_lines
    from art_cli.loop.evaluate import parse_gate

    gates = [parse_gate(gate) for gate in options.gates]
    report, sample = make_report(path, gold=options.gold)
    lines = report_lines(report)
    plain = msgspec.to_builtins(report)
    if options.html is not None:
        from art_cli.run_dir import write_file
        from art_cli.views.judge_page import judge_page

        write_file(options.html, judge_page(plain, asdict(sample), lines).encode())
    values = report.values()
    if options.as_json:
        sys.stdout.write(json.dumps({**summary, "report": plain, "values": values}) + "\n")
    else:
        sys.stdout.write(_as_text(summary) if summary else "")
        sys.stdout.writelines(f"{name:26s} {value}\n" for name, value in lines)
    for gate in gates:
        if gate.metric not in values:
            raise UsageError(
                f"--gate: no value {gate.metric!r} (is --gold set?); there are {', '.join(sorted(values))}"
            )
        if not gate.holds(values[gate.metric]) or is_partial:
            value = f"{gate.metric} is {values[gate.metric]:.4f}, not {gate.operator} {gate.bound:g}"
            raise GateError(f"gate missed: {'groups stay owed' if is_partial else value}")
