"""Curves, intervals, evaluations, findings and checkpoints of a run: what `art report` knows, as the page wants it.

Steps are those of the directories: the groups of step 3 are in step_0003, and the update from them is number 4 in
`art report`.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from art_cli.reports.findings import RunFinding, mean_interval
from art_cli.reports.run_report import RunReport, read_report
from art_cli.runs.durable import read_object
from art_cli.runs.history import sound
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runtime.errors import ArtError
from art_cli.view.index import Index

Json = dict[str, Any]
PAUSE = "pause"  # split of the lines of a pause, which hold no metrics
SMOOTHED = "reward_smoothed"  # the training reward as `art report` smooths it, with its interval


def run_numbers(run: RunDir) -> Json:
    """Returns all numbers of a run. What cannot be read is left out, and named under `problems`."""
    found: Json = {"config": None, "metrics": {}, "intervals": {}, "evaluations": [], "findings": [], "checkpoints": [],
                   "best_step": None, "stages": {}, "problems": []}  # fmt: skip
    try:
        found["config"] = read_object(run.config_path, within=run.root) if run.config_path.exists() else None
    except ArtError as error:
        found["problems"].append(str(error))
    try:
        lines, report = run.metrics(), read_report(run)
    except ArtError as error:
        found["problems"].append(str(error))
        return found
    found |= {
        "metrics": _curves(lines),
        "stages": _stages(lines, report),
        "findings": [_finding(each) for each in report.findings],
        "checkpoints": run.checkpoint_steps(),
        "best_step": report.best.step if report.best is not None else None,
        "evaluations": _evaluations(run, report),
        "pauses": [{"step": line.step, "rules": sound(line.metrics)} for line in lines if line.split == PAUSE],
        "reward_names": report.reward_names,
        "report": msgspec.to_builtins(report),
    }
    found["intervals"] = _intervals(report, found["evaluations"])
    found["metrics"].setdefault("train", {})[SMOOTHED] = [[p.step - 1, p.mean] for p in report.training_reward]
    return found


def file_numbers(index: Index) -> Json:
    """Returns the numbers of a source without a run: the mean reward of each of its steps."""
    curves: dict[str, list[list[float | None]]] = {}
    for step in index.steps():
        if (mean := step.numbers().mean_reward) is not None:
            curves.setdefault(step.split, []).append([step.step, mean])
    metrics = {split: {"reward_mean": points} for split, points in curves.items()}
    return {"config": None, "metrics": metrics, "intervals": {}, "evaluations": [], "findings": [], "checkpoints": [],
            "best_step": None, "stages": {}, "problems": []}  # fmt: skip


def _curves(lines: list[MetricsLine]) -> Json:
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for line in sorted(lines, key=lambda line: line.step):
        for name, value in sound(line.metrics).items() if line.split != PAUSE else ():
            curves.setdefault(line.split, {}).setdefault(name, []).append([line.step, value])
    return dict(curves)


def _stages(lines: list[MetricsLine], report: RunReport) -> Json:
    """Seconds of each stage by step: sampling, judging, training, evaluating."""
    names = {"sample_s": "sample", "judge_s": "judge", "train_s": "train"}
    stages: dict[str, list[list[float]]] = {}
    for line in sorted(lines, key=lambda line: line.step):
        for name, value in sound(line.metrics).items() if line.split == "train" else ():
            if name in names:
                stages.setdefault(names[name], []).append([line.step, value])
    return dict(stages)


def _finding(finding: RunFinding) -> Json:
    """As in `art report --json`, and where its groups are."""
    is_evaluation = finding.kind == "evaluation_fell"
    at = {
        "step": finding.step if is_evaluation else max(0, finding.step - 1),
        "split": "eval" if is_evaluation else "train",
    }
    return {**msgspec.to_builtins(finding), "cures": finding.cures, "at": at}


def _evaluations(run: RunDir, report: RunReport) -> list[Json]:
    """Returns every metric of every evaluation, with its interval where the scenarios' values are known."""
    found = []
    for each in report.evaluations:
        values = _values(run, each.step)
        metrics = dict(each.metrics) | ({"reward": each.reward.mean} if each.reward is not None else {})
        for name, mean in metrics.items():
            numbers = [value for value in values.get(name, {}).values() if math.isfinite(value)]
            interval = mean_interval(numbers)
            low, high = (interval.low, interval.high) if interval is not None else (None, None)
            found.append({"step": each.step, "metric": name, "mean": mean, "low": low, "high": high, "n": len(numbers)})
    return found


def _values(run: RunDir, step: int) -> Mapping[str, Mapping[str, float]]:
    try:
        evaluation = run.evaluation(step)
    except ArtError:
        return {}
    return evaluation.values if evaluation is not None else {}


def _intervals(report: RunReport, evaluations: list[Json]) -> Json:
    bands: dict[str, list[list[float]]] = {}
    for each in evaluations:
        if each["low"] is not None:
            bands.setdefault(each["metric"], []).append([each["step"], each["low"], each["high"]])
    smoothed = [[p.step - 1, p.low, p.high] for p in report.training_reward if p.low is not None]
    return {"eval": bands, "train": {SMOOTHED: smoothed}}
