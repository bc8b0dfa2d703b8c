"""History: the numbers of a run by step, as plain data. The training loop keeps one; a report reads one from files.

    metrics.jsonl, step_0036/evaluation.json -> History -> findings.py, report.py

Numbers that no run of ours writes (infinite, or too large to compute with) are left out, because the files may be
damaged or anyone's.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)
MAX_NUMBER, MAX_STEP = 1e15, 10**9  # larger ones are left out


class UpdateNumbers(NamedTuple):
    """One step's numbers. Update 1 makes the policy of step 1, from rollouts of the policy of step 0."""

    number: int
    metrics: dict[str, float]
    time: float = 0.0  # seconds since the epoch, when it was done

    def get(self, name: str) -> float | None:
        return self.metrics.get(name)

    def per_attempt(self, name: str) -> float | None:
        """Returns a count divided by the number of trajectories of the step, or None if one of them is unknown."""
        num = self.metrics.get("num_trajectories", 0.0)
        return self.metrics[name] / num if num >= 1 and name in self.metrics else None


class Evaluated(NamedTuple):
    """One evaluation. Example: Evaluated(6, {"reward": 0.5}, {"game-1": 1.0, "game-2": 0.0}, 1.7e9, 4.2)"""

    step: int
    metrics: dict[str, float]  # means by name
    rewards: Mapping[str, float] = {}  # scenario id -> mean reward of its attempts; empty: not known
    time: float = 0.0
    seconds: float | None = None  # duration, or None if unknown


class History(NamedTuple):
    """All of them in ascending order, each update and step once."""

    updates: list[UpdateNumbers]
    evaluations: list[Evaluated]
    warm_up: dict[str, float] | None = None  # numbers of the sft before the first step, or None without one


def read_history(run: RunDir) -> History:
    """Returns the history of a run as far as it came.

    Raises DataError: metrics.jsonl is damaged before its last line.
    """
    lines = [line for line in run.metrics() if 0 <= line.step <= MAX_STEP]
    updates = [_update(line) for line in lines if line.split == "train"]
    evaluations = [_evaluated(run, line) for line in lines if line.split == "eval"]
    warm_up = next((sound(line.metrics) for line in lines if line.split == "sft"), None)
    return History(sorted(updates, key=lambda each: each.number), sorted(evaluations, key=lambda e: e.step), warm_up)


def _update(line: MetricsLine) -> UpdateNumbers:
    return UpdateNumbers(line.step + 1, sound(line.metrics), _time(line))


def _evaluated(run: RunDir, line: MetricsLine) -> Evaluated:
    """Returns the evaluation, without intervals if its own file is damaged or not there."""
    rewards: Mapping[str, float] = {}
    seconds = None
    try:
        if (found := run.evaluation(line.step)) is not None:
            rewards, seconds = sound(found.values.get("reward", {})), found.seconds
            if lost := run.num_lost(line.step, found):
                path, all_ = run.eval_path(line.step), found.attempts
                log.warning("%s has %d of %d attempts; the numbers are those of all", path, all_ - lost, all_)
    except DataError as error:
        log.warning("%s; its interval is left out", error)
    seconds = seconds if seconds is not None and 0 <= seconds < MAX_NUMBER else None
    return Evaluated(line.step, sound(line.metrics), rewards, _time(line), seconds)


def _time(line: MetricsLine) -> float:
    return line.time if 0 <= line.time < MAX_NUMBER else 0.0


def is_comparable(config: Mapping[str, Any]) -> bool:
    """Returns True if training rewards of different steps can be compared, by the resolved configuration as a dict.

    RULER only compares the attempts of a group. Scenarios that come in the file's order, or are chosen by past success,
    may get harder by design.
    """
    rollout = config.get("rollout")
    order = rollout if isinstance(rollout, Mapping) else {}
    is_alike = order.get("shuffle") is not False and order.get("choose") != "adaptive"
    return is_alike and not _names_ruler(config.get("judge"))


def _names_ruler(section: Any) -> bool:
    if not isinstance(section, Mapping):
        return False
    return section.get("name") == "ruler" or "ruler" in section or any(map(_names_ruler, section.values()))


def sound(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the numbers that can be computed with."""
    return {name: value for name, value in numbers.items() if math.isfinite(value) and abs(value) < MAX_NUMBER}
