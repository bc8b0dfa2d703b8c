"""RunReport: a run as plain data: rewards with intervals, metrics by step, findings, time and cost.

    read_report(RunDir) -> RunReport -> pages/report_text.py, pages/report_page.py, or JSON

Reads configuration, metrics, evaluations and checkpoint names, but no weights. Only a few scored files are read, for
judges that make calls, and trajectories only if all attempts failed. A run of a thousand steps is therefore reported
quickly. The run may still be training.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from statistics import fmean
from typing import Any

import msgspec

from art_cli.config.metric_names import OF_SOURCES, SHADOW
from art_cli.judges.files.run_labels import RunLabels, shares
from art_cli.judges.judge_report import JudgeWindow, judge_windows
from art_cli.reports.findings import RunFinding, failed_kinds, find, judge_fell
from art_cli.runs.durable import read_lines
from art_cli.runs.history import (
    Evaluated,
    Failures,
    Fault,
    History,
    UpdateNumbers,
    count_failures,
    find_fault,
    is_comparable,
    judge_sections,
    read_history,
)
from art_cli.runs.intervals import mean_interval
from art_cli.runs.manifest import digest_of, read_manifest
from art_cli.runs.promise import Promised, compare
from art_cli.runs.run_checkpoints import explain, run_config, wanted_steps
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import read_served
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import CheckpointError, DataError, UsageError, printable

log = logging.getLogger(__name__)
SCHEMA = 1  # version of the JSON printed by `art report --json`
MAX_WORD = 120  # shown characters of a configuration value
SMOOTHED = 20  # the training reward is smoothed over this fraction of the run, at least 5 steps
MAX_POINTS = 1000  # maximum points in the training reward curve; longer runs are subsampled

Getter = Callable[[UpdateNumbers], float | None]
NAMES = ("no_signal_share", "entropy", "clip_fraction", "logprob_change", "logprob_gap", "grad_norm", "kl")
SERIES: dict[str, Getter] = {
    "reward": methodcaller("get", "reward_mean"),
    **{name: methodcaller("get", name) for name in NAMES},
    "tokens_per_rollout": methodcaller("per_attempt", "tokens_sampled"),
    "turns_per_rollout": methodcaller("per_attempt", "turns"),
    "failed_share": methodcaller("per_attempt", "num_failed"),
    "limited_share": methodcaller("per_attempt", "num_limited"),
}


class Point(msgspec.Struct, frozen=True):
    """A mean at a step with its 95 % interval, if known."""

    step: int
    mean: float
    low: float | None = None
    high: float | None = None


class ReportedEvaluation(msgspec.Struct, frozen=True):
    """An evaluation."""

    step: int
    reward: Point | None
    num_scenarios: int | None
    metrics: dict[str, float]
    difference: Point | None = None  # from evaluation 1's reward, paired over scenarios


class Rollouts(msgspec.Struct, frozen=True):
    """Training attempts; `failed` lists each step's most common kinds."""

    num: int
    num_failed: int
    num_limited: int
    failed: dict[str, int]


class Seconds(msgspec.Struct, frozen=True):
    """Time by activity. With train.max_staleness above 0, sampling and training overlap."""

    sampling: float
    judging: float  # after each step's last rollout
    training: float
    evaluating: float

    @property
    def total(self) -> float:
        return self.sampling + self.judging + self.training + self.evaluating


class JudgeCost(msgspec.Struct, frozen=True):
    """The cost of the judge's calls. `usd` requires known prices."""

    calls: int
    tokens: int
    usd: float | None


class Gain(msgspec.Struct, frozen=True):
    """The rise in reward from the initial policy to the best policy, and its cost.

    `of` is "evaluation", or "training" without evaluations. Rates require a gain and a known cost above 0.
    """

    of: str
    first: Point
    best: Point
    points: float
    rollouts: int
    minutes: float
    usd: float | None
    per_minute: float | None
    per_1000_rollouts: float | None
    per_usd: float | None


class Kept(msgspec.Struct, frozen=True):
    """A policy of the run, with its checkpoint if it still exists."""

    step: int
    reward: float | None  # if evaluated
    checkpoint: str | None
    digest: str = ""  # policy digest; "" without a proof


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON object printed by `art report --json`."""

    schema_version: int = SCHEMA
    run: str
    made_with: dict[str, str]
    num_steps: int
    wanted_steps: int | None  # train.steps, if known
    updated: float | None  # time of the latest metric, in seconds since the epoch
    warm_up: dict[str, float] | None
    evaluations: list[ReportedEvaluation]
    training_reward: list[Point]  # smoothed
    reward_names: dict[str, str]  # names of the rewards of steps ("train") and evaluations ("eval")
    series: dict[str, list[tuple[int, float]]]
    rollouts: Rollouts
    proofs: dict[str, int] = {}  # number of steps with proven weights, and of undecided proofs
    seconds: Seconds
    judge: JudgeCost | None  # None without calls, or for runs of older versions
    promised: list[Promised]  # promises of `art plan` and actual values; empty until the run is finished
    judge_windows: list[JudgeWindow]  # judge reliability by steps, from a few scored files
    gain: Gain | None
    best: Kept | None  # highest evaluated reward; ties go to the latest
    last: Kept | None  # the newest checkpoint
    offered: str  # checkpoint served by `art serve RUN`, and the reason; "" without any
    fault: str  # reason why the run learned nothing (exit code 1), or ""
    findings: list[RunFinding]  # starting with the fault


def read_report(run: RunDir) -> RunReport:
    """Raises UsageError for a missing path or one that is not a run, and DataError for damaged config.json or
    metrics.jsonl."""
    if not run.root.exists():
        raise UsageError(f"{run.root}: no such file or directory")
    if not any(path.exists() for path in (run.metrics_path, run.checkpoints, run.config_path)):
        raise UsageError(f"{run.root}: not a run (no metrics.jsonl, config.json or checkpoints/)")
    config, history = run_config(run), read_history(run)
    smoothed, steps = smooth(history.updates), run.checkpoint_steps()
    fault, labels = find_run_fault(run, history), RunLabels(run).answers()
    return RunReport(
        **closing(run, config, history, fault),
        num_steps=max([update.number for update in history.updates] + steps, default=0),
        wanted_steps=_whole(_inner(config, "train", "steps")),
        updated=max([*(u.time for u in history.updates), *(e.time for e in history.evaluations)], default=0.0) or None,
        warm_up=history.warm_up,
        training_reward=smoothed,
        series={name: _series(history.updates, of) for name, of in (SERIES | _named_getters(history)).items()}
        | ({"labels/alike": shares(labels)} if labels else {}),
        rollouts=_rollouts(history.updates),
        proofs=_proofs(history.updates),
        seconds=_seconds(history),
        judge=_judge(history.updates),
        promised=_promised(run, history),
        judge_windows=_judge_windows(run, history.updates),
        gain=_gain(history, smoothed),
        findings=_of_fault(fault, history) + judge_fell(labels) + find(history, is_comparable=is_comparable(config)),
    )


def closing(run: RunDir, config: Mapping[str, Any], history: History, fault: Fault | None) -> dict[str, Any]:
    """Returns the report fields that `art train` prints at the end."""
    rewarded = [each for each in history.evaluations if "reward" in each.metrics]
    best = max(rewarded, key=lambda each: (each.metrics["reward"], each.step), default=None)
    steps = run.checkpoint_steps()
    last = steps[-1] if steps else max((update.number for update in history.updates), default=None)
    offered = next(iter(wanted_steps(run, "offered")), None)
    to_serve = "" if offered is None else explain(run, offered)
    if (served := read_served(run.root)) is not None:
        to_serve = f"{served.checkpoint}, promoted by art improve"
    return {
        "run": str(run.root),
        "made_with": _made_with(config),
        "evaluations": [_evaluation(each, history.evaluations[0]) for each in history.evaluations],
        "reward_names": reward_names(config, _reward_is(run, rewarded)),
        "best": None if best is None else _kept(run, steps, history, best.step),
        "last": None if last is None else _kept(run, steps, history, last),
        "offered": to_serve,
        "fault": "" if fault is None else str(fault),
    }


# --- whether it learned -----------------------------------------------------------------------------------------------


def find_run_fault(run: RunDir, history: History) -> Fault | None:
    """Returns the fault of all steps so far, over all starts; otherwise the fault of the last evaluation.

    A step has signal if it changed weights, so with a critic, a teacher or an imitation loss any rewards are
    sufficient. Metrics missing in older runs count as good.
    """
    updates = history.updates
    num, num_failed, num_groups = _counts(updates, "num_trajectories", "num_failed", "num_groups")
    failures = Failures(num_failed, num, ", ".join(failed_kinds(updates)), num_failed)
    is_called = any(update.metrics.get("turns", 1.0) for update in updates)
    if failures.is_all or not is_called:
        read = count_failures(each for update in updates for each in run.trajectories(update.number - 1))
        failures = read if read.num >= num_failed else failures  # some files may be missing
    is_learning = any(update.metrics.get("num_updates", 1.0) for update in updates)
    fault = find_fault(failures, is_called=is_called, num_without_signal=0 if is_learning else num_groups)
    return fault or _evaluation_fault(run, history)


def _evaluation_fault(run: RunDir, history: History) -> Fault | None:
    """Returns the fault of the last evaluation, which measures the policy to serve."""
    last = history.evaluations[-1] if history.evaluations else None
    is_called = last is None or last.metrics.get("num_turns", 1.0) > 0
    if last is None or (is_called and last.metrics.get("failed") != 1.0):
        return None
    fault = find_fault(count_failures(read_lines(run.eval_path(last.step), Trajectory)), is_called=is_called)
    return fault and fault._replace(text=f"evaluation at step {last.step}: {fault.text}")


def _of_fault(fault: Fault | None, history: History) -> list[RunFinding]:
    if fault is None:
        return []
    steps = [each.number for each in history.updates] or [history.evaluations[-1].step]
    return [RunFinding(fault.kind, steps[0], steps[-1], fault.text, [], fault.cure)]


# --- configuration ----------------------------------------------------------------------------------------------------


def _made_with(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the most important configuration values, each as a printable word."""
    algorithm = ("algorithm", "entry") if config.get("algorithm") else ("loss", "name")
    keys = {"model": ("model", "base"), "algorithm": algorithm, "judge": ("judge", "name"),
            "engine": ("engine", "name"), "learner": ("learner", "name"),
            "learning_rate": ("train", "learning_rate")}  # fmt: skip
    if _inner(config, "learner", "name") == "prompt":  # there is no gradient
        del keys["algorithm"], keys["learning_rate"]
    found = {name: _inner(config, *key) for name, key in keys.items()}
    return {name: printable(value, limit=MAX_WORD) for name, value in found.items() if value is not None}


def _inner(config: Mapping[str, Any], section: str, key: str) -> Any:
    found = config.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


# --- rewards ----------------------------------------------------------------------------------------------------------


def reward_names(config: Mapping[str, Any], reward_is: str) -> dict[str, str]:
    """Returns names for the rewards of steps and evaluations; "reward" if both come from the rollouts.

    `reward_is` as in evaluation.json. Example: {"train": "ruler score", "eval": "share of wins"}
    """
    judges = {name for each in judge_sections(config) if isinstance(name := each.get("name"), str)}
    if judges <= {"rollout", "none"}:
        return {"train": "reward", "eval": "reward"}
    names = {"wins": "share of wins", "own": "rollout's reward"}
    judge = " and ".join(sorted(judges))
    return {"train": f"{printable(judge, limit=MAX_WORD)} score", "eval": names.get(reward_is, "reward")}


def _reward_is(run: RunDir, rewarded: Sequence[Evaluated]) -> str:
    try:
        last = run.evaluation(rewarded[-1].step) if rewarded else None
    except DataError:  # its interval is missing for the same reason, with a warning
        return ""
    return "" if last is None else last.reward_is


def _evaluation(each: Evaluated, first: Evaluated | None = None) -> ReportedEvaluation:
    reward = each.metrics.get("reward")
    metrics = {name: value for name, value in each.metrics.items() if name != "reward"}
    if reward is None:
        return ReportedEvaluation(each.step, None, None, metrics)
    point, known = _point(each.step, reward, list(each.rewards.values())), len(each.rewards) or None
    common = sorted(each.rewards.keys() & first.rewards.keys()) if first is not None and first.step != each.step else []
    rises = [each.rewards[name] - first.rewards[name] for name in common] if first is not None else []
    return ReportedEvaluation(
        each.step, point, known, metrics, _point(each.step, fmean(rises), rises) if rises else None
    )


def _point(step: int, mean: float, values: Sequence[float]) -> Point:
    interval = mean_interval(values)
    return Point(step, mean) if interval is None else Point(step, mean, interval.low, interval.high)


def smooth(updates: Sequence[UpdateNumbers]) -> list[Point]:
    """Returns the smoothed training reward; its intervals tend to be too wide, as a trend counts as noise."""
    rewarded = [(update.number, update.metrics["reward_mean"]) for update in updates if "reward_mean" in update.metrics]
    half = max(5, len(rewarded) // SMOOTHED) // 2
    points = []
    for index in sorted({*range(0, len(rewarded), len(rewarded) // MAX_POINTS + 1), len(rewarded) - 1} - {-1}):
        number = rewarded[index][0]
        near = [reward for _, reward in rewarded[max(0, index - half) : index + half + 1]]
        points.append(_point(number, fmean(near), near))
    return points


def _named_getters(history: History) -> dict[str, Getter]:
    """Returns each shadow judge's mean score, gap and correlation with the reward; each source's rewards and signal."""
    names = {name for update in history.updates for name in update.metrics}
    shown = sorted(n for n in names if n.startswith(SHADOW) and not n.endswith((".num", ".reward", "std")))
    shown += sorted(name for name in names if name.startswith(tuple(f"{each}." for each in OF_SOURCES[:2])))
    return {name: methodcaller("get", name) for name in shown}


def _series(updates: Sequence[UpdateNumbers], of: Getter) -> list[tuple[int, float]]:
    return [(update.number, value) for update in updates if (value := of(update)) is not None]


# --- time and cost ----------------------------------------------------------------------------------------------------


def _sum(updates: Sequence[UpdateNumbers], name: str) -> float:
    return sum(update.metrics.get(name, 0.0) for update in updates)


def _counts(updates: Sequence[UpdateNumbers], *names: str) -> list[int]:
    return [round(_sum(updates, name)) for name in names]


def _proofs(updates: Sequence[UpdateNumbers]) -> dict[str, int]:
    undecided = [update.metrics["probe_undecided"] for update in updates if "probe_undecided" in update.metrics]
    return {"proven": undecided.count(0.0), "undecided": undecided.count(1.0)} if undecided else {}


def _rollouts(updates: Sequence[UpdateNumbers]) -> Rollouts:
    num, num_failed, num_limited = _counts(updates, "num_trajectories", "num_failed", "num_limited")
    return Rollouts(num, num_failed, num_limited, failed_kinds(updates))


def _seconds(history: History) -> Seconds:
    sampling, judging, training = (_sum(history.updates, name) for name in ("sample_s", "judge_s", "train_s"))
    return Seconds(sampling, judging, training, sum(each.seconds or 0.0 for each in history.evaluations))


def _promised(run: RunDir, history: History) -> list[Promised]:
    """Compares the promise with the actual values. Runs of a different length are not compared."""
    updates = history.updates
    try:
        promise = run.promise()
    except DataError as error:
        log.warning("the plan is skipped: %s", error)
        return []
    if promise is None or not updates or updates[-1].number != promise.steps:
        return []
    if updates[0].metrics.get("num_trajectories", promise.measured.num_attempts) != promise.measured.num_attempts:
        return []  # different groups
    seconds, judge = _seconds(history), _judge(updates)
    happened = msgspec.structs.asdict(seconds) | {"tokens": _sum(updates, "tokens_sampled")}
    if "run_s" in updates[-1].metrics:  # excludes the evaluation after the last update
        late = sum(each.seconds or 0.0 for each in history.evaluations if each.step >= updates[-1].number)
        happened["whole"] = updates[-1].metrics["run_s"] + late
    usd = 0.0 if judge is None else judge.usd
    if usd is not None and "whole" in happened:  # `run_usd` includes the plan's costs if its judge keeps an account
        ours = _sum(updates, "judge_usd") + (promise.measured.judge_usd or 0.0)
        happened["usd"] = max(usd, ours) + happened["whole"] / 3600 * promise.usd_per_hour
    return compare(promise, happened)


def _judge_windows(run: RunDir, updates: Sequence[UpdateNumbers]) -> list[JudgeWindow]:
    if _judge(updates) is None:
        return []
    paths = {update.number: run.scored_path(update.number - 1) for update in updates}
    return judge_windows({number: path for number, path in paths.items() if path.is_file()})


def _judge(updates: Sequence[UpdateNumbers]) -> JudgeCost | None:
    asked = [update for update in updates if update.metrics.get("judge_calls")]
    if not asked:
        return None
    usd = _sum(asked, "judge_usd") if all("judge_usd" in update.metrics for update in asked) else None
    if usd is not None and not any("reflection_usd" in update.metrics for update in asked):
        # includes the costs of killed starts
        usd = max(usd, *(update.metrics.get("run_usd", 0.0) for update in updates))
    calls, tokens = _counts(asked, "judge_calls", "judge_tokens")
    return JudgeCost(calls, tokens, usd)


def _gain(history: History, smoothed: Sequence[Point]) -> Gain | None:
    """Compares the initial with the best evaluation, or smoothed training rewards without two evaluations."""
    points = [each.reward for each in map(_evaluation, history.evaluations) if each.reward is not None]
    of = "evaluation"
    if len(points) < 2:
        points, of = list(smoothed), "training"
    if len(points) < 2:
        return None
    best = max(points, key=lambda point: (point.mean, point.step))
    updates = [update for update in history.updates if update.number <= best.step]
    until = History(updates, [each for each in history.evaluations if each.step <= best.step])
    minutes, judge = _seconds(until).total / 60, _judge(updates)
    gained, rollouts, usd = best.mean - points[0].mean, _rollouts(updates).num, judge.usd if judge is not None else None

    def rate(spent: float | None) -> float | None:
        return gained / spent if gained > 0 and spent else None

    per = (rate(minutes), rate(rollouts / 1000), rate(usd))
    return Gain(of, points[0], best, gained, rollouts, minutes, usd, *per)


def _kept(run: RunDir, steps: Sequence[int], history: History, step: int) -> Kept:
    reward = next((each.metrics.get("reward") for each in history.evaluations if each.step == step), None)
    if step not in steps:
        return Kept(step, reward, None)
    path, digest = run.checkpoint_path(step), ""
    with contextlib.suppress(CheckpointError):
        digest = digest_of(read_manifest(path))
    return Kept(step, reward, str(path), digest)
