"""RunLabels: what a person says of pairs of a run's steps, and whether its judge comes to agree less as the run trains.

The labels are those of PersonLabels, beside the scored file of each step. A person is asked about pairs that the judge
orders, drawn at random, of the step with the fewest answers. A pair that both order is alike or not.

Null hypothesis: given how many are alike, chance alone decides at which steps they are. A look compares the earlier
with the later steps at each place where they can be divided: by the difference of the two shares of alike pairs, in
standard deviations. How likely chance makes the largest of these as large is computed exactly, along all paths that
the number of alike pairs can take. There is a look after 20, 30, 45, 67, ... answers in the order of their time, with
the levels LEVEL / 2, LEVEL / 6, LEVEL / 12, ..., which add up to LEVEL. So at most a share LEVEL of runs, however many
labels they get, has a false alarm. The onset is the first step after the largest difference.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec
import numpy as np

from art_cli.judges.files.person_labels import Pair, PersonLabels, Verdict
from art_cli.judges.ruler.attempt_tree import Message
from art_cli.runs.manifest import STEP_NAME
from art_cli.runs.parting import LEVEL, Parting
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError

FIRST, GROWTH = 20, 1.5  # number of answers at the first look, and of each later look in that of the one before
MAX_WINDOWS, WINDOW = 5, 10  # number of windows of steps, and the fewest answers in one


class Answer(NamedTuple):
    """A pair that both order. Example: Answer(1767000000.0, step=31, is_alike=False)"""

    time: float
    step: int
    is_alike: bool


class LabelWindow(msgspec.Struct, frozen=True):
    """The answers of some neighbouring steps. Example: LabelWindow(21, 40, num=18, alike=0.83)"""

    first: int
    last: int
    num: int
    alike: float  # share of the pairs that the judge orders as the person does


class RunLabelReport(msgspec.Struct, frozen=True):
    """What the labels say of the judge of a run."""

    num_labels: int  # pairs that both order
    num_needed: int  # labels more until the next look
    windows: list[LabelWindow]
    parted: str  # the alarm in words, or ""

    def lines(self) -> list[str]:
        """Returns the report in words."""
        rows = [f"steps {each.first} to {each.last}: {each.alike:.3f} of {each.num} pairs" for each in self.windows]
        lines = [f"labels    {self.num_labels} pairs that judge and person order; next look in {self.num_needed}"]
        return [*lines, *(f"alike     {row}" for row in rows), f"parted    {self.parted or 'not that the labels show'}"]


class RunLabels:
    """Raises UsageError if no step of the run has a pair that its judge orders, DataError if a file is damaged."""

    def __init__(self, run: RunDir) -> None:
        self._paths = {int(named[1]) + 1: path for path in run.root.glob("step_*/scored.jsonl")
                       if (named := STEP_NAME.fullmatch(path.parent.name))}  # fmt: skip
        self._opened: dict[int, PersonLabels] = {}  # by step
        self._answered: list[PersonLabels] = []
        self._steps = random.Random(0).sample(sorted(self._paths), len(self._paths))
        self.labels_path = run.root / "step_*" / "labels.jsonl"
        if not self._paths:
            raise UsageError(f"{run.root}: no step_*/scored.jsonl in it; name a run or a scored file")

    def _open(self, step: int) -> PersonLabels:
        if step not in self._opened:
            self._opened[step] = PersonLabels(self._paths[step])
        return self._opened[step]

    def next(self) -> Pair | None:
        """Returns the pair to ask about, or None if all have been."""
        while self._steps:
            step = min(self._steps, key=self._num_asked)
            try:
                self._asked = self._open(step)
                if (pair := self._asked.next_ordered()) is not None:
                    return pair
            except UsageError:  # no group of the step has two rewards
                pass
            self._steps.remove(step)
        return None

    def _num_asked(self, step: int) -> int:
        has_labels = step in self._opened or self._paths[step].with_name(self.labels_path.name).exists()
        return self._open(step).num_asked if has_labels else 0

    def load_messages(self, pair: Pair) -> tuple[list[Message], list[Message]]:
        """Returns all messages of the left and of the right attempt of the last question."""
        return self._asked.load_messages(pair)

    def answer(self, pair: Pair, verdict: Verdict) -> None:
        """Appends the label. `undo` takes back the last one since this object was made."""
        if verdict != "undo":
            self._asked.answer(pair, verdict)
            self._answered.append(self._asked)
        elif self._answered:
            self._answered.pop().answer(pair, verdict)

    def answers(self) -> list[Answer]:
        """Returns the labels of pairs that both order, in the order of their steps."""
        steps = [step for step in sorted(self._paths) if self._num_asked(step)]
        return [Answer(time, step, is_alike) for step in steps for time, is_alike in self._open(step).ordered()]

    def report(self) -> RunLabelReport:
        answers = self.answers()
        alarm, num = find_fall(answers), len(answers)
        parted = "" if alarm is None else describe_fall(answers, alarm)
        return RunLabelReport(num, next(look for look in _looks() if look > num) - num, label_windows(answers), parted)


def label_windows(answers: Sequence[Answer]) -> list[LabelWindow]:
    """Returns up to five windows of steps with about as many answers each."""
    ordered, size = sorted(answers, key=lambda each: each.step), math.ceil(max(len(answers) / MAX_WINDOWS, WINDOW))
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [LabelWindow(part[0].step, part[-1].step, len(part), _share(part)) for part in parts]


def _share(answers: Sequence[Answer]) -> float:
    return sum(each.is_alike for each in answers) / len(answers)


def find_fall(answers: Sequence[Answer]) -> Parting | None:
    """Returns the first alarm that looks at the answers give, or None."""
    answers = sorted(answers)
    for look, num in enumerate(takewhile(lambda num: num <= len(answers), _looks()), 1):
        seen = sorted(answers[:num], key=lambda each: each.step)
        chance, onset = largest_fall(seen)
        if chance <= LEVEL / (look * (look + 1)):
            return Parting("labels", onset, seen[-1].step)
    return None


def _looks() -> Iterator[int]:
    """Yields the numbers of answers at which there is a look."""
    num = FIRST
    while True:
        yield num
        num = int(num * GROWTH)


def describe_fall(answers: Sequence[Answer], alarm: Parting) -> str:
    """Example: "judge and labels part since step 31 (false in at most 1% of runs): they order 0.93 of 40 pairs alike
    before, 0.55 of 38 since"."""
    before, since = ([each for each in answers if (each.step >= alarm.onset) == is_late] for is_late in (False, True))
    return (
        f"judge and labels part since step {alarm.onset} (false in at most {LEVEL:.0%} of runs): they order "
        f"{_share(before):.2f} of {len(before)} pairs alike before, {_share(since):.2f} of {len(since)} since"
    )


def largest_fall(seen: Sequence[Answer]) -> tuple[float, int]:
    """Returns how likely chance makes the largest fall between earlier and later steps as large, and its step."""
    num, total = len(seen), sum(each.is_alike for each in seen)
    places, alike = np.arange(1, num), np.arange(total + 1)
    spread = np.sqrt(places * (num - places))
    # falls[i, j]: the fall if j of the first i + 1 answers are alike; nothing is divided within a step
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
