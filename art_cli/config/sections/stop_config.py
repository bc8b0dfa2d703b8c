"""The `stop` section: rules that pause a run, or warn, by any metric, by its hours, or by its cost."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from art_cli.config.sections.base_config import Float, NonNegative, PositiveFloat, PositiveInt, Section

BOUNDS = ("above", "below", "below_best_by")


class StopRule(Section):
    """One of three kinds: a `metric` with a bound, `hours`, or `usd`."""

    metric: str | None = None
    """A metric of a training step, by its name in metrics.jsonl, such as `reward_mean`, `no_signal_share`, `entropy`,
    `logprob_gap`, `truncated_share` or `metrics.NAME` for one that rollouts report; or of an evaluation:
    `eval.reward`."""
    above: Float | None = None
    """The rule fires when the metric is above this."""
    below: Float | None = None
    """The rule fires when the metric is below this."""
    below_best_by: PositiveFloat | None = None
    """The rule fires when the metric is at least this much below its best value in the run. With `for_steps`, means
    over that many steps in a row are compared."""
    for_steps: PositiveInt = 1
    """The number of steps in a row in which the metric must be above or below; for `eval.` metrics, of evaluations.
    Steps without the metric do not count."""
    hours: PositiveFloat | None = None
    """The rule fires at the end of the step at which all starts of the run together have taken this many hours."""
    usd: PositiveFloat | None = None
    """The rule fires at the end of the step at which the judges' calls in all starts of the run together have cost this
    many dollars. `judge.budget_usd`, in contrast, stops before the call that would exceed it."""
    usd_per_hour: NonNegative = 0.0
    """The price of an hour of the machine, which `usd` then includes."""
    then: Literal["pause", "warn"] = "pause"
    """pause: the run ends with its checkpoint and exit code 1, and the same command resumes it. The rule then starts
    over: it counts later steps only, or as many further hours or dollars. warn: a warning is logged each time the
    rule begins to hold."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [kind for kind in ("metric", "hours", "usd") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError("set exactly one of 'metric', 'hours' and 'usd'")
        num_bounds = sum(getattr(self, bound) is not None for bound in BOUNDS)
        if self.metric is not None and num_bounds != 1:
            raise ValueError("set exactly one of 'above', 'below' and 'below_best_by' beside 'metric'")
        return self

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
        for knob in (*BOUNDS, "for_steps") if self.metric is None else ():
            if knob in self.model_fields_set and getattr(self, knob) is not None:
                yield knob, "used with 'metric' only"
        if self.usd_per_hour and self.usd is None:
            yield "usd_per_hour", "used with 'usd' only"

    def __str__(self) -> str:
        """Example: "no_signal_share above 0.9 for 5 steps"."""
        if self.hours is not None:
            return f"{self.hours:g} hours"
        if self.usd is not None:
            return f"${self.usd:g}" + (f" at ${self.usd_per_hour:g} an hour" if self.usd_per_hour else "")
        kind = "evaluations" if str(self.metric).startswith("eval.") else "steps"
        if self.below_best_by is not None:
            over = f", the mean of {self.for_steps} {kind}," if self.for_steps > 1 else ""
            return f"{self.metric}{over} {self.below_best_by:g} below its best"
        bound = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.metric} {bound}" + (f" for {self.for_steps} {kind}" if self.for_steps > 1 else "")
