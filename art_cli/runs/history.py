"""History: a run's numbers by step. Failures: counts of failed rollouts with the most common cause. Plain data.

    metrics.jsonl, step_0036/evaluation.json -> History -> findings.py, run_report.py

The training loop updates a History; reports read one from files. Infinite and huge numbers are dropped, because files
may be damaged or come from strangers.

`art report` and every command that plays rollouts end by printing Failures, plus a Fault when the rollouts cannot teach
anything. Exit code 1 depends on Fault alone.
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

MAX_CAUSE = 300  # characters shown of a cause
MAX_ID = 100  # characters shown of the scenario id after the cause
MEND_AGENT = "art check plays two attempts and shows what they do"
CALL_THE_MODEL = "policy.client, or policy.base_url and policy.api_key in the agent's own client (docs/rollouts.md)"
FIND_SIGNAL = (
    "a higher rollout.sampling.temperature, a larger rollout.group_size, scenarios neither solved nor hopeless, "
    "rewards with more levels, or a judge that ranks the attempts (judge=ruler)"
)

MAX_NUMBER, MAX_STEP = 1e15, 10**9  # larger numbers are dropped
_NUMBER = re.compile(r"\d+")


class Failures(NamedTuple):
    """Example: Failures(3, 8, "timeout: not finished after 600 s (rollout.timeout_s)", 2)"""

    num: int
    num_played: int
    cause: str  # the most common error, quoted from one trajectory; "" when nothing failed
    num_alike: int  # number of trajectories with that cause; errors that differ only in numbers are one cause

    @property
    def is_all(self) -> bool:
        """True if rollouts were played and all failed."""
        return 0 < self.num == self.num_played

    def __str__(self) -> str:
        """Example: "3 of 8 failed, 2 of them with timeout: not finished after 600 s (rollout.timeout_s)"."""
        if not self.num:
            return f"none of {self.num_played} failed"
        alike = "" if self.num_alike == self.num == 1 else f", {self.num_alike} of them"
        return f"{self.num} of {self.num_played} failed{alike} with {self.cause}"


def count_failures(trajectories: Iterable[Trajectory]) -> Failures:
    """Counts the trajectories with an error or the policy's own failure. Equally common causes: the first counts."""
    num_played, examples, counts = 0, dict[str, str](), Counter[str]()
    for trajectory in trajectories:
        num_played += 1
        if error := trajectory.error or trajectory.failure:
            nature = _NUMBER.sub("0", error)
            where = f" (scenario {str(trajectory.scenario['id'])[:MAX_ID]})" if "id" in trajectory.scenario else ""
            examples.setdefault(nature, f"{' '.join(error.split())[:MAX_CAUSE]}{where}")
            counts[nature] += 1
    if not counts:
        return Failures(0, num_played, "", 0)
    [(nature, num_alike)] = counts.most_common(1)
    return Failures(counts.total(), num_played, examples[nature], num_alike)


class Fault(NamedTuple):
    """The reason why training learns nothing from these rollouts. Example: Fault("all_failed", "every attempt ...",
    "...")

    Kinds: all_failed, no_calls, nothing_learned.
    """

    kind: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.text}; try: {self.cure}"


def find_fault(failures: Failures, *, is_called: bool, num_without_signal: int = 0) -> Fault | None:
    """Checks a whole run, file or evaluation for a fault. Returns None also when nothing was played.

    `is_called` is True if any attempt called the model. `num_without_signal` is the number of groups when none of them
    has signal. It is 0 when some group has signal or the rollouts need no signal.
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
        text = f"no signal: rewards within {groups} are equal, so nothing can be learned{also}"
        cure = f"first mend what failed ({MEND_AGENT}), then {FIND_SIGNAL}" if failures.num else FIND_SIGNAL
        return Fault("nothing_learned", text, cure)
    return None


class UpdateNumbers(NamedTuple):
    """A step's numbers. Update 1 turns policy 0 into policy 1, using rollouts of policy 0."""

    number: int
    metrics: dict[str, float]
    time: float = 0.0  # seconds since the epoch at the end of the update

    def get(self, name: str) -> float | None:
        return self.metrics.get(name)

    def per_attempt(self, name: str) -> float | None:
        """Returns a count divided by the step's number of trajectories."""
        num = self.metrics.get("num_trajectories", 0.0)
        return self.metrics[name] / num if num >= 1 and name in self.metrics else None


class Evaluated(NamedTuple):
    """One evaluation. Example: Evaluated(6, {"reward": 0.5}, {"game-1": 1.0, "game-2": 0.0}, 1.7e9, 4.2)"""

    step: int
    metrics: dict[str, float]  # means by name
    rewards: Mapping[str, float] = {}  # scenario id -> mean reward of its attempts; empty when unknown
    time: float = 0.0
    seconds: float | None = None  # duration


class History(NamedTuple):
    """Updates and evaluations in ascending order without duplicates."""

    updates: list[UpdateNumbers]
    evaluations: list[Evaluated]
    warm_up: dict[str, float] | None = None  # metrics of the initial SFT phase

    def until(self, step: int) -> "History":
        """Returns the history up to a policy."""
        updates = [each for each in self.updates if each.number <= step]
        return self._replace(updates=updates, evaluations=[each for each in self.evaluations if each.step <= step])


def read_updates(lines: Iterable[MetricsLine]) -> list[UpdateNumbers]:
    trained = (line for line in lines if line.split == "train" and 0 <= line.step <= MAX_STEP)
    found = [UpdateNumbers(line.step + 1, sound(line.metrics), _time(line)) for line in trained]
    return sorted(found, key=lambda each: each.number)


def read_history(run: RunDir) -> History:
    """Reads a run's history. Raises DataError if metrics.jsonl is damaged above the last line."""
    lines = [line for line in run.metrics() if 0 <= line.step <= MAX_STEP]
    evaluations = [_evaluated(run, line) for line in lines if line.split == "eval"]
    warm_up = next((sound(line.metrics) for line in lines if line.split == "sft"), None)
    return History(read_updates(lines), sorted(evaluations, key=lambda e: e.step), warm_up)


def _evaluated(run: RunDir, line: MetricsLine) -> Evaluated:
    """Returns the evaluation. Its intervals are missing when evaluation.json is missing or damaged."""
    rewards: Mapping[str, float] = {}
    seconds = None
    try:
        if (found := run.evaluation(line.step)) is not None:
            rewards, seconds = sound(found.values.get("reward", {})), found.seconds
            if lost := run.num_lost(line.step, found):
                path, all_ = run.eval_path(line.step), found.attempts
                log.warning("%s has %d of %d attempts; the numbers count all attempts", path, all_ - lost, all_)
    except DataError as error:
        log.warning("%s; its interval is skipped", error)
    seconds = seconds if seconds is not None and 0 <= seconds < MAX_NUMBER else None
    return Evaluated(line.step, sound(line.metrics), rewards, _time(line), seconds)


def _time(line: MetricsLine) -> float:
    return line.time if 0 <= line.time < MAX_NUMBER else 0.0


def is_comparable(config: Mapping[str, Any]) -> bool:
    """Returns True if training rewards are comparable across steps under this resolved configuration.

    RULER only compares attempts within a group, and "none" gives no rewards. Scenarios in file order, or chosen by past
    success, may get harder by design.
    """
    order = as_mapping(config.get("rollout"))
    is_alike = order.get("shuffle") is not False and order.get("choose") != "adaptive"
    return is_alike and not any(map(_compares_or_is_none, judge_sections(config)))


def judge_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the judge section, or one section per source with `rollout.sources`."""
    sources = as_mapping(as_mapping(config.get("rollout")).get("sources"))
    own = [as_mapping(source).get("judge") for source in sources.values()]
    return [as_mapping(judge or config.get("judge")) for judge in own or [None]]


def _compares_or_is_none(section: Mapping[str, Any]) -> bool:
    is_one = section.get("name") in ("ruler", "none") or "ruler" in section
    return is_one or any(_compares_or_is_none(as_mapping(part)) for part in section.values())


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def sound(numbers: Mapping[str, float]) -> dict[str, float]:
    """Drops numbers that are infinite, NaN or huge."""
    return {name: value for name, value in numbers.items() if math.isfinite(value) and abs(value) < MAX_NUMBER}
