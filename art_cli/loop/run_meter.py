"""RunMeter: how long a run has taken and what its judges have cost, over all of its starts.

What earlier starts took is read from the last step's metrics, and from the judge's own record of its calls, which holds
those of a step that was killed too. The time of a step that was killed counts when the step is done again.
"""

import time
from collections.abc import Sequence

from art_cli.judges import Judge
from art_cli.runs.history import History

STAGES = ("sample_s", "judge_s", "train_s")  # seconds that are added up for a run of an older version


class RunMeter:
    """Counts from its making on; `follow` adds what earlier starts took."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = judges
        self._begin = time.monotonic()
        self._seconds_before, self._usd_before = 0.0, 0.0

    def follow(self, history: History) -> None:
        """Adds the hours and dollars of earlier starts."""
        last = next((each for each in reversed(history.updates) if "run_s" in each.metrics), None)
        number = 0 if last is None else last.number
        later = [each for each in history.updates if each.number > number]
        evaluations = [each.seconds or 0.0 for each in history.evaluations if each.step >= number]
        stages = [each.metrics.get(name, 0.0) for each in later for name in STAGES]
        self._seconds_before = (0.0 if last is None else last.metrics["run_s"]) + sum(stages) + sum(evaluations)
        recorded = sum(each.metrics.get("judge_usd", 0.0) for each in history.updates)
        spent = max((each.metrics.get("run_usd", 0.0) for each in history.updates), default=0.0)
        self._usd_before = max(recorded, spent, sum(judge.spent_usd for judge in self._judges))

    def numbers(self) -> dict[str, float]:
        """Returns `run_s`, and `run_usd` if a judge makes calls and the price of each is known."""
        numbers = {"run_s": self._seconds_before + time.monotonic() - self._begin}
        usages = [judge.usage for judge in self._judges]
        costs = [usage.cost_usd for usage in usages if usage.cost_usd is not None]
        usd = self._usd_before + sum(costs)
        if len(costs) == len(usages) and (usd or any(usage.calls for usage in usages)):
            numbers["run_usd"] = usd
        return numbers
