"""How many rollouts failed, and the commonest cause; every command that plays rollouts says so at its end."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from art_cli.trajectory import Trajectory

MAX_CAUSE = 300  # characters of a cause that are shown

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
    """The failures among the trajectories. Of causes that are equally common the first one counts."""
    num_played, examples, counts = 0, dict[str, str](), Counter[str]()
    for trajectory in trajectories:
        num_played += 1
        if trajectory.error is not None:
            nature = _NUMBER.sub("0", trajectory.error)
            examples.setdefault(nature, " ".join(trajectory.error.split())[:MAX_CAUSE])
            counts[nature] += 1
    if not counts:
        return Failures(0, num_played, "", 0)
    [(nature, num_alike)] = counts.most_common(1)
    return Failures(counts.total(), num_played, examples[nature], num_alike)
