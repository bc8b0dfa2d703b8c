"""RunLabels: human labels on attempt pairs from a run, and a test for decreasing agreement between judge and person.

Uses a PersonLabels file next to each step's scored file. Asks about random pairs with different judge scores, from the
step with the fewest answers. If both judge and person order a pair, their orders are either alike or not.

Null hypothesis: given the total number of alike pairs, their steps are random. Each look compares earlier with later
steps at every possible split: the difference between the two shares of alike pairs, in standard deviations. The
probability of a maximum at least this large is computed exactly over all paths of the alike count. Looks happen after
20, 30, 45, 67, 101, ... answers in chronological order, at levels LEVEL / 2, LEVEL / 6, LEVEL / 12, ..., which sum to
LEVEL. So at most a share LEVEL of runs has a false alarm, for any number of labels. The onset is the first step after
the maximum.
"""

import logging
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from art_cli.judges.files.person_labels import Pair, PersonLabels, Verdict
from art_cli.judges.ruler.attempt_tree import Message
from art_cli.runs.manifest import STEP_NAME
from art_cli.runs.parting import LEVEL, Parting
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError, DataError, UsageError

log = logging.getLogger(__name__)

LOOKS = [int(20 * 1.5**look) for look in range(20)]  # numbers of answers that trigger a look
MAX_WINDOWS, WINDOW = 5, 10  # maximum number of step windows, and minimum answers per window


class OrderedPair(NamedTuple):
    """A pair that judge and person both order. Example: OrderedPair(1767000000.0, step=31, is_alike=False)"""

    time: float
    step: int
    is_alike: bool


class RunLabelReport(msgspec.Struct, frozen=True):
    """Agreement between the run's judge and the labels."""

    num_labels: int  # pairs ordered by both
    num_needed: int  # additional labels until the next look
    alike: list[tuple[int, float]]  # (last step, share of alike pairs) per step window
    parted: str  # alarm message, or ""

    def lines(self) -> list[str]:
        """Returns the report as text lines."""
        shares = ", ".join(f"{share:.2f} up to step {step}" for step, share in self.alike)
        return [
            f"labels    {self.num_labels} pairs that judge and person order; next look in {self.num_needed}",
            f"alike     {shares or 'not known yet'}",
            f"parted    {self.parted or 'not that the labels show'}",
        ]


class RunLabels:
    """Labels for a run's steps. Steps are numbered by the update they produced, as in `art report`."""

    def __init__(self, run: RunDir) -> None:
        self._run, self.labels_path = run, run.root / "step_*" / "labels.jsonl"
        scored = {path: STEP_NAME.fullmatch(path.parent.name) for path in run.root.glob("step_*/scored.jsonl")}
        self._paths = {int(named[1]) + 1: path for path, named in scored.items() if named}
        self._open = cache(lambda step: PersonLabels(self._paths[step]))
        self._order = random.Random(0).sample(sorted(self._paths), len(self._paths))
        self._answered: list[PersonLabels] = []

    def _num_asked(self, step: int) -> int:
        has_labels = self._paths[step].with_name(self.labels_path.name).exists()
        return self._open(step).num_asked if has_labels else 0

    def _rank(self, step: int) -> int:
        """Returns the number of answers for sorting steps; 0 if unreadable."""
        with suppress(UsageError, DataError):
            return self._num_asked(step)
        return 0

    def next(self) -> Pair | None:
        """Returns the next pair to label, if any remain."""
        for step in sorted(self._order, key=self._rank):
            with suppress(UsageError, DataError):  # unreadable, or no group with two rewards
                self._asked = self._open(step)
                if (pair := self._asked.next_ordered()) is not None:
                    return pair
        return None

    def load_messages(self, pair: Pair) -> tuple[list[Message], list[Message]]:
        """Returns all messages of the last question's left and right attempts."""
        return self._asked.load_messages(pair)

    def answer(self, pair: Pair, verdict: Verdict) -> None:
        """Appends a label. `undo` removes the last label added through this object."""
        if verdict != "undo":
            self._asked.answer(pair, verdict, is_random=True)
            self._answered.append(self._asked)
        elif self._answered:
            self._answered.pop().answer(pair, verdict)

    def answers(self) -> list[OrderedPair]:
        """Returns labels for pairs ordered by both. Unreadable steps are skipped with a warning."""
        found = list[OrderedPair]()
        for step in self._paths:
            try:
                if self._num_asked(step):
                    found += [OrderedPair(time, step, is_alike) for time, is_alike in self._open(step).ordered()]
            except ArtError as error:
                log.warning("%s; its labels are skipped", error)
        return found

    def report(self) -> RunLabelReport:
        """Raises UsageError if the run has no scored steps."""
        if not self._paths:
            raise UsageError(f"{self._run.root}: no step_*/scored.jsonl in it; name a run or a scored file")
        answers = self.answers()
        alarm, num = find_fall(answers), len(answers)
        parted = "" if alarm is None else describe_fall(answers, alarm)
        return RunLabelReport(num, next(look for look in LOOKS if look > num) - num, shares(answers), parted)


def shares(answers: Sequence[OrderedPair]) -> list[tuple[int, float]]:
    """Returns (last step, share of alike pairs) for up to five step windows with similar numbers of answers."""
    ordered, size = sorted(answers, key=lambda each: each.step), math.ceil(max(len(answers) / MAX_WINDOWS, WINDOW))
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [(part[-1].step, _share(part)) for part in parts]


def _share(answers: Sequence[OrderedPair]) -> float:
    return sum(each.is_alike for each in answers) / len(answers)


def find_fall(answers: Sequence[OrderedPair]) -> Parting | None:
    """Returns the first alarm, if any."""
    for look, num in enumerate((num for num in LOOKS if num <= len(answers)), 1):
        seen = sorted(sorted(answers)[:num], key=lambda each: each.step)
        chance, onset = largest_fall(seen)
        if chance <= LEVEL / (look * (look + 1)):
            return Parting("labels", onset, seen[-1].step)
    return None


def describe_fall(answers: Sequence[OrderedPair], alarm: Parting) -> str:
    """Example: "judge and labels part since step 31 (false in at most 1% of runs): they order 0.93 of 40 pairs alike
    before, 0.55 of 38 since"
    """
    before, since = ([each for each in answers if (each.step >= alarm.onset) == is_late] for is_late in (False, True))
    return (
        f"judge and labels part since step {alarm.onset} (false in at most {LEVEL:.0%} of runs): they order "
        f"{_share(before):.2f} of {len(before)} pairs alike before, {_share(since):.2f} of {len(since)} since"
    )


def largest_fall(seen: Sequence[OrderedPair]) -> tuple[float, int]:
    """Returns the p value of the largest fall between earlier and later steps, and the step after it."""
    num, total = len(seen), sum(each.is_alike for each in seen)
    places, alike = np.arange(1, num), np.arange(total + 1)
    spread = np.sqrt(places * (num - places))
    # falls[i, j]: the fall if j of answers 0..i are alike; splits within a step are excluded
    falls = (alike[None] - total * places[:, None] / num) / spread[:, None]
    steps = np.array([each.step for each in seen])
    falls[steps[1:] == steps[:-1]] = -np.inf
    taken = falls[places - 1, np.cumsum([each.is_alike for each in seen])[:-1]]
    at, chance, paths = int(taken.argmax()), 0.0, (alike == 0).astype(float)
    for place in places:
        up = paths * (total - alike) / (num - place + 1)
        paths = paths - up
        paths[1:] += up[:-1]
        is_over = falls[place - 1] >= taken[at] - 1e-9
        chance += float(paths[is_over].sum())
        paths[is_over] = 0.0
    return chance, int(steps[at + 1])
