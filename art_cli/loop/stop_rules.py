"""StopRules: rules of the `stop` section that fire after a step or an evaluation; RunMeter: hours and dollars.

A rule with `then: warn` fires when its condition starts to hold. A pausing rule fires while its condition holds. After
a pause it starts over, so a resumed run is not paused again immediately:

    metric     only steps after the pause count
    parts_from the test starts over, still comparing with the run's first steps
    hours, usd the rule's amount counts from the pause

RunMeter counts all starts of a run. Earlier starts are read from the last step's metrics and from the judge's own
record of its calls, which includes killed steps. A killed step's time counts when the step is repeated. The rules are
pure functions of the history.
"""

import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from art_cli.config.metric_names import CLOSE, EVAL
from art_cli.config.sections.train_config import StopRule
from art_cli.judges.costs import Payer
from art_cli.runs.history import History
from art_cli.runs.parting import describe_parting, find_parting, read_beside

Series = Sequence[tuple[int, float]]  # (number of updates done, value), ascending


class RunMeter:
    """Counts a run's hours and dollars. Earlier starts are counted from the history and the payers' records."""

    def __init__(self, payers: Sequence[Payer], *, begin: float, history: History) -> None:
        """`begin` is the start time on the `time.monotonic` clock."""
        self._payers, self._begin = payers, begin
        last = next((each for each in reversed(history.updates) if "run_s" in each.metrics), None)
        number = 0 if last is None else last.number
        evaluations = [each.seconds or 0.0 for each in history.evaluations if each.step >= number]
        self._seconds_before = (0.0 if last is None else last.metrics["run_s"]) + sum(evaluations)
        recorded = sum(each.metrics.get("judge_usd", 0.0) for each in history.updates)
        spent = max((each.metrics.get("run_usd", 0.0) for each in history.updates), default=0.0)
        self._usd_before = max(recorded, spent, sum(payer.spent_usd for payer in payers))

    def numbers(self) -> dict[str, float]:
        """Returns `run_s`, and `run_usd` if there are paid calls with known prices."""
        numbers = {"run_s": self._seconds_before + time.monotonic() - self._begin}
        usages = [payer.usage for payer in self._payers]
        costs = [usage.cost_usd for usage in usages if usage.cost_usd is not None]
        usd = self._usd_before + sum(costs)
        if len(costs) == len(usages) and (usd or any(usage.calls for usage in usages)):
            numbers["run_usd"] = usd
        return numbers


class Firing(NamedTuple):
    """A rule that holds. Example: Firing(rule, 0.95, "no_signal_share was above 0.9 for 5 steps, 3 to 7: now 0.95")"""

    rule: StopRule
    value: float
    text: str
    before: int | None = None  # last step before the finding began, if the rule has such a step

    @property
    def anew(self) -> str:
        """When the rule can fire again after pausing the run."""
        if self.rule.hours is not None:
            return f"after another {self.rule.hours:g} hours"
        if self.rule.usd is not None:
            return f"after another ${self.rule.usd:g}"
        if self.rule.parts_from is not None:
            return "when later steps show it too"
        kind = "evaluation" if _is_of_evaluation(self.rule) else "step"
        num = self.rule.for_steps
        return f"after {num} more {kind}{'s' if num > 1 else ''} at the earliest"


def spent_before(rules: Sequence[StopRule], history: History) -> dict[str, float]:
    """Returns each rule's newest value, as for a pause: in a fork, only later steps, hours and dollars count then."""
    found = {str(rule): _series(rule, history) for rule in rules if rule.parts_from is None}
    return {rule: series[-1][1] for rule, series in found.items() if series}


class StopRules:
    """A run's rules. `pauses` lists the pauses of earlier starts (`RunDir.pauses`)."""

    def __init__(self, rules: Sequence[StopRule], pauses: Mapping[str, tuple[int, float]]) -> None:
        self.rules = rules
        self._pauses = dict(pauses)
        self._looked: set[bool] = set()

    def after(self, history: History, step: int, *, of_evaluations: bool = False) -> list[Firing]:
        """Returns the rules that fire at `step`: rules on evaluations, or on steps, hours and dollars."""
        rules = [rule for rule in self.rules if _is_of_evaluation(rule) == of_evaluations]
        return [firing for rule in rules if (firing := self._check(rule, history, step)) is not None]

    def unreported(self, history: History, *, of_evaluations: bool) -> list[str]:
        """Returns a line for each rule whose metric is never reported, on the first call only."""
        if of_evaluations in self._looked:
            return []
        self._looked.add(of_evaluations)
        rules = [rule for rule in self.rules if rule.metric is not None and _is_of_evaluation(rule) == of_evaluations]
        records, prefix, lines = history.evaluations if of_evaluations else history.updates, EVAL * of_evaluations, []
        for rule in rules:
            if not _series(rule, history):
                names = sorted({f"{prefix}{name}" for record in records for name in record.metrics})
                near = get_close_matches(str(rule.metric), names, 1, CLOSE)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                lines.append(f"stop: nothing reports {rule.metric!r} so far, so its rule cannot fire; {hint}")
        return lines

    def _check(self, rule: StopRule, history: History, step: int) -> Firing | None:
        if rule.parts_from is not None:
            return self._check_parting(rule, rule.parts_from, history, step)
        series = [(number, value) for number, value in _series(rule, history) if number <= step]
        if not series or series[-1][0] != step:
            return None  # the step lacks the metric
        if rule.then == "warn":
            begins = _holds(rule, series) is not None and _holds(rule, series[:-1]) is None
            text = _holds(rule, series) if begins else None
        else:
            text = _holds(rule, series, *self._pauses.get(str(rule), (-1, 0.0)))
        return None if text is None else Firing(rule, series[-1][1], text)

    def _check_parting(self, rule: StopRule, anchor: str, history: History, step: int) -> Firing | None:
        since = -1 if rule.then == "warn" else self._pauses.get(str(rule), (-1, 0.0))[0]
        steps = [each for each in read_beside(history.updates, anchor) if each.step <= step]
        alarm = find_parting(steps, since=since)
        if alarm is None or (rule.then == "warn" and alarm.alarm != step):
            return None
        return Firing(rule, alarm.onset, describe_parting(anchor, steps, alarm), alarm.onset - 1)


def _is_of_evaluation(rule: StopRule) -> bool:
    return rule.metric is not None and rule.metric.startswith(EVAL)


def _series(rule: StopRule, history: History) -> Series:
    """Returns the rule's values: a metric, hours or dollars."""
    if rule.metric is not None and _is_of_evaluation(rule):
        name = rule.metric.removeprefix(EVAL)
        return [(each.step, each.metrics[name]) for each in history.evaluations if name in each.metrics]
    if rule.metric is not None:
        return [(each.number, each.metrics[rule.metric]) for each in history.updates if rule.metric in each.metrics]
    spent = [(each.number, each.metrics["run_s"] / 3600, each.get("run_usd") or 0.0) for each in history.updates
             if "run_s" in each.metrics]  # fmt: skip
    if rule.hours is not None:
        return [(number, hours) for number, hours, _ in spent]
    return [(number, usd + hours * rule.usd_per_hour) for number, hours, usd in spent]


def _holds(rule: StopRule, series: Series, since: int = -1, spent: float = 0.0) -> str | None:
    """Returns the reason for firing, if the rule holds.

    Only values after step `since` count, and only hours and dollars beyond `spent`.
    """
    new = [each for each in series if each[0] > since][-rule.for_steps :]
    if len(new) < rule.for_steps:
        return None
    last, steps = new[-1][1], f"{new[0][0]} to {new[-1][0]}" if len(new) > 1 else f"{new[-1][0]}"
    if rule.hours is not None:
        return f"the run has taken {last:.2f} hours" if last - spent >= rule.hours else None
    if rule.usd is not None:
        return f"the run has cost ${last:.2f}" if last - spent >= rule.usd else None
    kind = "evaluation" if _is_of_evaluation(rule) else "step"
    of = f"of {kind}{'s' if len(new) > 1 else ''} {steps}"
    if rule.below_best_by is not None:
        return _fell(rule, series, new, of)
    holds = all(value > rule.above if rule.above is not None else value < (rule.below or 0.0) for _, value in new)
    bound = f"above {rule.above:g}" if rule.above is not None else f"below {rule.below:g}"
    return f"{rule.metric} {of} was {bound}, at last {last:.4g}" if holds else None


def _fell(rule: StopRule, series: Series, new: Series, of: str) -> str | None:
    """Compares the mean of the last values with the best mean of the same number of consecutive values."""
    assert rule.below_best_by is not None
    width = rule.for_steps
    means = [
        (sum(value for _, value in series[end - width : end]) / width, series[end - 1][0])
        for end in range(width, len(series) + 1)
    ]
    now, (best, at) = means[-1][0], max(means)
    if best - now < rule.below_best_by:
        return None
    return f"{rule.metric} {of} was {now:.4g}, {best - now:.4g} below its best of {best:.4g} at {at}"
