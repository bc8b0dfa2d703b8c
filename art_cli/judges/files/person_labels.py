"""PersonLabels: what a person says of pairs of a scored file, and what follows for its judge.

Reads the scored file, and keeps the ids of its pairs and how the judge orders them. The labels are lines of
labels.jsonl beside it, each on the disk before the next question:

    {"schema_version": 1, "group_id": "s1", "left": "s1-0", "right": "s1-3", "verdict": "left", "time": 1767000000.0}

Chance chooses the attempt on the left. `undo` takes back the label of the same two sides. A pair with its sides swapped
was asked a second time. Labels of attempts that the file does not have are counted and play no part.
"""

import hashlib
import json
import random
import time
from itertools import chain, combinations
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from art_cli.judges.agreement import Ratio
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.judges.judge_report import ScoredRow
from art_cli.judges.pair_choice import JudgeAccuracy, Strata, credit
from art_cli.judges.ruler.attempt_tree import Message, read_attempt
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.trajectory import EQUAL_REWARDS, SCHEMA_VERSION, by_group
from art_cli.runtime.errors import DataError, RunError, UsageError

MAX_ATTEMPTS = 64  # in a group; the pairs of a larger one are among its first attempts
MAX_PAIRS = 2_000_000  # in one file
REPEAT_EVERY = 10  # labels for each pair that is asked again with its sides swapped
SIGNS = {"left": 1, "right": -1, "equal": 0}  # 1: the left attempt is better
Verdict = Literal["left", "right", "equal", "skip", "undo"]


class Pair(NamedTuple):
    """Two attempts as they are shown. Example: Pair("s1", "s1-0", "s1-3")"""

    group_id: str
    left: str
    right: str

    @property
    def swapped(self) -> "Pair":
        return Pair(self.group_id, self.right, self.left)


class PairLabel(msgspec.Struct, frozen=True, kw_only=True):
    """A line of labels.jsonl."""

    schema_version: int = SCHEMA_VERSION
    group_id: str
    left: str  # ids of trajectories
    right: str
    verdict: Verdict
    digests: tuple[str, str] | None = None  # of the two attempts' messages; None in lines of older versions
    time: float = 0.0  # seconds since the epoch
    is_random: bool = True  # whether the pair was drawn at random, not because the judge is likely to err on it

    @property
    def pair(self) -> Pair:
        return Pair(self.group_id, self.left, self.right)


class LabelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The worth of the judge by the labels."""

    num_pairs: int
    num_labels: int  # skipped pairs and repetitions do not count
    num_skipped: int
    num_unknown: int  # labels of attempts that are not in the file
    accuracy: JudgeAccuracy | None  # None before the first label
    num_needed: int  # labels more that are expected until the interval is narrow enough; 0: it is
    repeated: Ratio  # (pairs with the same answer when their sides were swapped, pairs asked twice)
    noise: dict[str, float] | Literal["votes"] | None  # value of judge.noise, or None if nothing gives one

    def lines(self) -> list[str]:
        """Returns the report in words."""
        unknown = f"; {self.num_unknown} labels are of attempts that are not in this file" if self.num_unknown else ""
        lines = [f"labels    {self.num_labels} of {self.num_pairs:,} pairs, {self.num_skipped} skipped{unknown}"]
        if self.accuracy is None:
            return lines
        value, low, high = self.accuracy
        more = f"about {self.num_needed} labels more, to" if self.num_needed else "enough:"
        noise = f"judge: {{noise: {json.dumps(self.noise)}}}".replace('"', "")
        return [
            *lines,
            f"accuracy  {value:.3f} of all pairs are ordered as you do; 95 % interval {low:.3f} to {high:.3f}",
            f"more      {more} plus or minus 5 points",
            f"yourself  {self.repeated[0]:.0f} of {self.repeated[1]:.0f} pairs answered alike with the sides swapped",
            f"noise     {noise if self.noise else 'no setting; it needs verdicts of 0 and 1, or votes'}",
        ]


class _Row(ScoredRow, kw_only=True):
    """A scored line, with what the choice needs."""

    id: str
    messages: msgspec.Raw = msgspec.Raw()
    length: int = 0  # bytes of its messages
    digest: str = ""  # of its messages

    def __post_init__(self) -> None:
        super().__post_init__()
        data = bytes(self.messages)
        self.digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        self.length, self.messages = len(data), msgspec.Raw()


class PersonLabels:
    """Raises UsageError (no such file, no pair in it) and DataError (a line cannot be read)."""

    def __init__(self, path: Path) -> None:
        self._source, self.labels_path = TrajectoryFile(path), path.with_name("labels.jsonl")
        groups = by_group(read_lines(path, _Row)).values()
        judged = [[row for row in rows if row.reward is not None][:MAX_ATTEMPTS] for rows in groups]
        self._rows = {(row.group_id, row.id): row for rows in judged for row in rows}
        if not 0 < sum(len(rows) * (len(rows) - 1) // 2 for rows in judged) <= MAX_PAIRS:
            raise UsageError(f"{path}: no two attempts of a group have rewards, or too many; judge it first: art judge")
        draw = random.Random(0)
        rows = [draw.sample(each, 2) for group in judged for each in combinations(group, 2)]
        draw.shuffle(rows)
        self._numbers = {Pair(a.group_id, a.id, b.id): number for number, (a, b) in enumerate(rows)}
        self._pairs = list(self._numbers)
        if len(self._pairs) < len(rows):
            raise DataError("an id is used twice in its group", path)
        self._differences = np.array([(a.reward or 0.0) - (b.reward or 0.0) for a, b in rows])
        longer = np.array([a.length > b.length for a, b in rows])
        self._strata = Strata(np.abs(self._differences), longer == (self._differences > 0))
        self.read()

    def read(self) -> None:
        """Reads the labels, which another process may write too."""
        self._said: dict[Pair, PairLabel] = {}
        self._num_unknown = 0
        for label in read_lines(self._own_file(), PairLabel):
            self._take(label)
        self._count()

    def _own_file(self) -> Path:
        """Returns the path of the labels. Raises RunError: something else is in its place, such as a link."""
        if self.labels_path.is_symlink() or (self.labels_path.exists() and not self.labels_path.is_file()):
            raise RunError(f"{self.labels_path}: not a regular file; remove it")
        return self.labels_path

    def _take(self, label: PairLabel) -> None:
        if self._number(label.pair) is None or label.digests not in (None, self._digests(label.pair)):
            self._num_unknown += 1  # another file beside this one may have attempts of the same ids
        elif label.verdict == "undo":
            self._said.pop(label.pair, None)
        else:
            self._said[label.pair] = label

    def _digests(self, pair: Pair) -> tuple[str, str]:
        left, right = (self._rows[pair.group_id, id].digest for id in (pair.left, pair.right))
        return left, right

    def _number(self, pair: Pair) -> int | None:
        return self._numbers.get(pair, self._numbers.get(pair.swapped))

    def _count(self) -> None:
        """Takes the first answer to each pair as its label."""
        self._first: dict[int, Pair] = {}  # number of a pair -> its sides as they were asked first
        for pair in self._said:
            self._first.setdefault(self._number(pair) or 0, pair)
        self._signs = {  # number of a labelled pair -> the person's order of its sides as the file has them
            number: SIGNS[verdict] * (1 if pair in self._numbers else -1)
            for number, pair in self._first.items()
            if (verdict := self._said[pair].verdict) in SIGNS
        }
        self.num_asked = len(self._first)  # pairs that were labelled or skipped
        of, differences = self._strata.of, self._differences
        self._strata.count((int(of[at]), credit(float(differences[at]), sign)) for at, sign in self._signs.items())

    # --- asking -------------------------------------------------------------------------------------------------------

    def next(self) -> Pair | None:
        """Returns the pair to ask about, the same one until it is answered, or None if all have been."""
        once = [pair for at in self._signs if (pair := self._first[at]).swapped not in self._said]
        if len(self._signs) - len(once) < len(self._signs) // REPEAT_EVERY:
            return once[0].swapped
        of, sizes = self._strata.of, self._strata.sizes
        stratum = self._strata.choose(sizes - np.bincount(of[np.fromiter(self._first, int)], minlength=len(sizes)))
        numbers = [] if stratum is None else np.flatnonzero(of == stratum).tolist()
        return next((self._pairs[number] for number in numbers if number not in self._first), None)

    def next_ordered(self) -> Pair | None:
        """Returns a pair that the judge orders, drawn at random, the same one until it is answered, or None."""
        numbers = np.flatnonzero(np.abs(self._differences) > EQUAL_REWARDS).tolist()
        return next((self._pairs[number] for number in numbers if number not in self._first), None)

    def answer(self, pair: Pair, verdict: Verdict, *, is_random: bool = False) -> None:
        """Appends the label. `undo` is for the last answer, whatever the pair. `is_random`: `next_ordered` chose it.

        Raises UsageError (no such pair), RunError and DataError (it cannot be appended).
        """
        if verdict == "undo":
            if not self._said:
                return
            pair = next(reversed(self._said))
        if self._number(pair) is None:
            raise UsageError("the scored file has no such pair")
        digests, now = self._digests(pair), time.time()
        label = PairLabel(**pair._asdict(), verdict=verdict, digests=digests, time=now, is_random=is_random)
        with LineWriter(self._own_file()) as writer:
            writer.append(label)
            writer.sync()
        self._take(label)
        self._count()

    def load_messages(self, pair: Pair) -> tuple[list[Message], list[Message]]:
        """Returns all messages of the left and of the right attempt. Raises DataError: a line cannot be read."""
        group = self._source.groups[pair.group_id]
        try:
            attempts = {each.id: read_attempt(each) for each in self._source.load(group) if each.id in pair[1:]}
        except RecursionError as error:
            raise DataError("JSON is nested too deeply", self._source.path, group.first_line) from error
        left, right = (list(chain(*attempts[name].conversations)) for name in pair[1:])
        return left, right

    # --- what follows -------------------------------------------------------------------------------------------------

    def ordered(self) -> list[tuple[float, bool]]:
        """Returns (time, whether the judge orders it alike) of each labelled pair that both order and that was drawn at
        random, because others are rather those on which the judge errs."""
        return [
            (label.time, difference * sign > 0)
            for number, sign in self._signs.items()
            if sign
            and (label := self._said[self._first[number]]).is_random
            and abs(difference := float(self._differences[number])) > EQUAL_REWARDS
        ]

    def report(self) -> LabelReport:
        said = {pair: SIGNS[label.verdict] for pair, label in self._said.items() if label.verdict in SIGNS}
        twice = [pair for at in self._signs if (pair := self._first[at]).swapped in said]
        alike = [pair for pair in twice if said[pair] == -said[pair.swapped]]
        return LabelReport(
            num_pairs=len(self._pairs),
            num_labels=len(self._signs),
            num_skipped=self.num_asked - len(self._signs),
            num_unknown=self._num_unknown,
            accuracy=self._strata.accuracy() if self._signs else None,
            num_needed=self._strata.num_needed(),
            repeated=Ratio(len(alike), len(twice)),
            noise=self._noise(),
        )

    def _noise(self) -> dict[str, float] | Literal["votes"] | None:
        """Returns the value of judge.noise.

        For verdicts of 0 and 1: the person's better attempt of a pair is one that deserves a 1, the worse one a 0.
        Each label counts for as many pairs as it stands for.
        """
        rows = self._rows.values()
        if any(row.reward not in (0, 1) for row in rows):
            return "votes" if all(any(len(each.votes) > 1 for each in row.scores) for row in rows) else None
        sums, weights = np.zeros(3), self._strata.sizes / np.maximum(self._strata.nums, 1)
        for number, sign in self._signs.items():
            pair = self._pairs[number]
            worse, better = (self._rows[pair.group_id, name].reward for name in pair[1:][:: -sign or 1])
            sums += weights[self._strata.of[number]] * abs(sign) * np.array([1, worse == 1, better == 0])
        rates = [round(float(wrong / max(sums[0], 1e-9)), 3) for wrong in sums[1:]]
        is_usable = sums[0] > 0 and sum(rates) < 1
        return dict(zip(("false_positive", "false_negative"), rates, strict=True)) if is_usable else None
