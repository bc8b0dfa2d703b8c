"""The end of an attempt, as its process reports it: an Outcome or an AttemptError, as plain JSON data.

Standard library only, because the process may be a Python that has none of our dependencies (bootstrap.py). The process
also runs the user's code, so what it reports is checked whole.
"""

from dataclasses import dataclass
from typing import Any

from art_cli.rollouts.attempt_errors import AttemptError
from art_cli.runs.outcome import MAX_NUMBER, Outcome
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.processes.process_calls import checked

Json = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """The fields of an Outcome. Raises ValueError: a number or metadata that a record cannot hold."""

    reward: float | None
    metrics: dict[str, float]
    metadata: Json

    def __post_init__(self) -> None:
        numbers = [*self.metrics.values(), *([] if self.reward is None else [self.reward])]
        if not all(isinstance(number, float) and abs(number) <= MAX_NUMBER for number in numbers):
            raise ValueError("a reward or metric that is no finite number")
        if is_deep(self.metadata):
            raise ValueError("metadata that are nested too deeply")


@dataclass(frozen=True)
class Failed:
    """The fields of an AttemptError."""

    kind: str
    message: str
    is_transport: bool


def report(ending: Outcome | AttemptError) -> Json:
    """Example: {"done": {"reward": 1.0, "metrics": {}, "metadata": {}}}"""
    if isinstance(ending, Outcome):
        return {"done": vars(ending)}
    return {"failed": {"kind": ending.kind, "message": ending.message, "is_transport": ending.is_transport}}


def read_report(value: object) -> Outcome | AttemptError:
    """Returns the ending that `report` wrote. Raises ValueError: it is no report."""
    match value:
        case {"done": fields, **more} if not more:
            return Outcome(**vars(checked(Done, fields)))
        case {"failed": fields, **more} if not more:
            failed: Failed = checked(Failed, fields)
            return AttemptError(failed.kind, failed.message, is_transport=failed.is_transport)
    raise ValueError("it reports neither an outcome nor an error")
