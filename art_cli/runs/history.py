"""History: the numbers of a run by step; Failures: failed rollouts with their commonest cause. Both are plain data.

    metrics.jsonl, step_0036/evaluation.json -> History -> findings.py, run_report.py

The training loop keeps a History; a report reads one from files. Numbers that no run of ours writes (infinite, or too
large to compute with) are left out, because the files may be damaged or anyone's.

Every command that plays rollouts, and `art report`, ends with the words about failures, and about whether anything can
be learned from the rollouts played. A Fault is the one rule for exit code 1.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)

MAX_CAUSE = 300  # characters of a cause that are shown
MAX_ID = 100  # characters of the scenario's id behind it
MEND_AGENT = "art check plays two attempts and shows what they do"
CALL_THE_MODEL = "policy.client, or policy.base_url and policy.api_key in the agent's own client (docs/rollouts.md)"
FIND_SIGNAL = (
    "a higher rollout.sampling.temperature, a larger rollout.group_size, scenarios neither solved nor hopeless, "
    "rewards with more levels, or a judge that ranks the attempts (judge=ruler)"
)

_NUMBER = re.compile(r"\d+")


class Failures(NamedTuple):
    """Example: Failures(3, 8, "timeout: not finished after 600 s (rollout.timeout_s)", 2)"""

    num: int
    num_played: int
    cause: str  # the commonest error, in the words of one trajectory; "": none failed
    num_alike: int  # number of trajectories with that cause; errors that differ only in numbers are one cause

    @property
    def is_all(self) -> bool:
        """Whether rollouts were played and none of them finished."""
        return 0 < self.num == self.num_played

    def __str__(self) -> str:
        """Example: "3 of 8 failed, 2 of them with timeout: not finished after 600 s (rollout.timeout_s)"."""
        if not self.num:
            return f"none of {self.num_played} failed"
        alike = "" if self.num_alike == self.num == 1 else f", {self.num_alike} of them"
        return f"{self.num} of {self.num_played} failed{alike} with {self.cause}"


def count_failures(trajectories: Iterable[Trajectory]) -> Failures:
    """Returns the failures among the trajectories. Of causes that are equally common the first one counts."""
    num_played, examples, counts = 0, dict[str, str](), Counter[str]()
    for trajectory in trajectories:
        num_played += 1
        if trajectory.error is not None:
            nature = _NUMBER.sub("0", trajectory.error)
            where = f" (scenario {str(trajectory.scenario['id'])[:MAX_ID]})" if "id" in trajectory.scenario else ""
            examples.setdefault(nature, f"{' '.join(trajectory.error.split())[:MAX_CAUSE]}{where}")
            counts[nature] += 1
    if not counts:
        return Failures(0, num_played, "", 0)
    [(nature, num_alike)] = counts.most_common(1)
    return Failures(counts.total(), num_played, examples[nature], num_alike)


class Fault(NamedTuple):
    """Why nothing can be learned from what was played. Example: Fault("all_failed", "every attempt failed: ...", "...")

    The kinds are all_failed, no_calls and nothing_learned.
    """

    kind: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.text}; try: {self.cure}"


def find_fault(failures: Failures, *, is_called: bool, num_without_signal: int = 0) -> Fault | None:
    """Returns the fault of a whole run, file or evaluation; None if it has none, or if nothing was played.

    `is_called`: whether any attempt called the model. `num_without_signal` is the number of groups if no group has
    signal, and 0 if one has or if what was played need not have any.
    """
    if not failures.num_played:
        return None
    if failures.is_all:
        return Fault("all_failed", f"every attempt failed: {failures}", MEND_AGENT)
    also = f"; {failures}" if failures.num else ""
    if not is_called:
        return Fault("no_calls", f"no attempt called the model{also}", CALL_THE_MODEL)
    if num_without_signal:
        groups = "the one group" if num_without_signal == 1 else f"each of {num_without_signal} groups"
        text = f"no signal: rewards within {groups} are equal, so that nothing can be learned{also}"
        cure = f"first mend what failed ({MEND_AGENT}), then {FIND_SIGNAL}" if failures.num else FIND_SIGNAL
        return Fault("nothing_learned", text, cure)
    return None


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

    def until(self, step: int) -> "History":
        """Returns the history up to a policy."""
        updates = [each for each in self.updates if each.number <= step]
        return self._replace(updates=updates, evaluations=[each for each in self.evaluations if each.step <= step])


def read_updates(lines: Iterable[MetricsLine]) -> list[UpdateNumbers]:
    """Returns the updates among the lines of a run's metrics, in order."""
    found = [_update(line) for line in lines if line.split == "train" and 0 <= line.step <= MAX_STEP]
    return sorted(found, key=lambda each: each.number)


def read_history(run: RunDir) -> History:
    """Returns the history of a run as far as it came.

    Raises DataError: metrics.jsonl is damaged before its last line.
    """
    lines = [line for line in run.metrics() if 0 <= line.step <= MAX_STEP]
    evaluations = [_evaluated(run, line) for line in lines if line.split == "eval"]
    warm_up = next((sound(line.metrics) for line in lines if line.split == "sft"), None)
    return History(read_updates(lines), sorted(evaluations, key=lambda e: e.step), warm_up)


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

    RULER only compares the attempts of a group, and "none" gives no rewards. Scenarios in the file's order, or that
    are chosen by past success, may get harder by design.
    """
    order = _mapping(config.get("rollout"))
    is_alike = order.get("shuffle") is not False and order.get("choose") != "adaptive"
    return is_alike and not any(map(_compares_or_is_none, judge_sections(config)))


def judge_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the section of the judge, or with `rollout.sources` that of each source's judge."""
    sources = _mapping(_mapping(config.get("rollout")).get("sources"))
    own = [_mapping(source).get("judge") for source in sources.values()]
    return [_mapping(judge or config.get("judge")) for judge in own or [None]]


def _compares_or_is_none(section: Mapping[str, Any]) -> bool:
    is_one = section.get("name") in ("ruler", "none") or "ruler" in section
    return is_one or any(_compares_or_is_none(_mapping(part)) for part in section.values())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sound(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns the numbers that can be computed with."""
    return {name: value for name, value in numbers.items() if math.isfinite(value) and abs(value) < MAX_NUMBER}
