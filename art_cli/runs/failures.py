"""Failures: failed rollouts with their commonest cause, and whether anything can be learned from those played.

Every command that plays rollouts, and `art report`, ends with these words. A Fault is the one rule for exit code 1.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from art_cli.runs.trajectory import Trajectory

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
        return Fault("nothing_learned", text, FIND_SIGNAL)
    return None
