"""PersonLabels: human labels on attempt pairs from a scored file, and the resulting judge accuracy.

Reads the scored file and keeps pair ids and the judge's order in memory. Labels are lines in labels.jsonl next to the
scored file; each label is on disk before the next question:

    {"schema_version": 1, "group_id": "s1", "left": "s1-0", "right": "s1-3", "verdict": "left", "time": 1767000000.0}

Sides are assigned at random. `undo` removes the label with the same sides. A pair with swapped sides is a repeated
question. Labels for unknown attempts are counted but not used.
"""

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
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

MAX_ATTEMPTS = 64  # per group; pairs use only the first attempts of larger groups
MAX_PAIRS = 2_000_000  # per file
REPEAT_EVERY = 10  # one pair is repeated with swapped sides per this many labels
SIGNS = {"left": 1, "right": -1, "equal": 0}  # 1 if the left attempt is better
Verdict = Literal["left", "right", "equal", "skip", "undo"]
SIDES: dict[int, Verdict] = {1: "left", -1: "right", 0: "equal"}


class Pair(NamedTuple):
    """Two attempts as displayed. Example: Pair("s1", "s1-0", "s1-3")"""

    group_id: str
    left: str
    right: str

    @property
    def swapped(self) -> "Pair":
        return Pair(self.group_id, self.right, self.left)


class PairLabel(msgspec.Struct, frozen=True, kw_only=True):
    """A line in labels.jsonl."""

    schema_version: int = SCHEMA_VERSION
    group_id: str
    left: str  # trajectory ids
    right: str
    verdict: Verdict
    digests: tuple[str, str] | None = None  # digests of both attempts' messages; missing in old lines
    time: float = 0.0  # seconds since the epoch
    is_random: bool = True  # drawn at random, not selected for a likely judge error

    @property
    def pair(self) -> Pair:
        return Pair(self.group_id, self.left, self.right)


class LabelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Judge accuracy according to the labels."""

    num_pairs: int
    num_labels: int  # without skipped pairs and repetitions
    num_skipped: int
    num_unknown: int  # labels for unknown attempts
    accuracy: JudgeAccuracy | None  # None before any label
    num_needed: int  # expected additional labels until the interval is narrow enough
    repeated: Ratio  # (consistent answers after swapping sides, pairs asked twice)
    noise: dict[str, float] | Literal["votes"] | None  # suggested value for judge.noise

    def lines(self) -> list[str]:
        """Returns the report as text lines."""
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
    """A scored line with the fields needed for choosing pairs."""

    id: str
    messages: msgspec.Raw = msgspec.Raw()
    length: int = 0  # bytes of all messages
    digest: str = ""  # digest of all messages

    def __post_init__(self) -> None:
        super().__post_init__()
        data = bytes(self.messages)
        self.digest = message_digest(data)
        self.length, self.messages = len(data), msgspec.Raw()


def message_digest(messages: bytes | msgspec.Raw) -> str:
    """Returns the digest of an attempt's messages as they are in the file."""
    return hashlib.blake2b(bytes(messages), digest_size=8).hexdigest()


class PersonLabels:
    """Raises UsageError (no such file, no pairs) and DataError (invalid line)."""

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
        """Reads the labels, including labels written by other processes."""
        self._said: dict[Pair, PairLabel] = {}
        self._num_unknown = 0
        for label in read_lines(self._own_file(), PairLabel):
            self._take(label)
        self._count()

    def _own_file(self) -> Path:
        """Returns the labels path. Raises RunError unless it is a regular file or missing."""
        if self.labels_path.is_symlink() or (self.labels_path.exists() and not self.labels_path.is_file()):
            raise RunError(f"{self.labels_path}: not a regular file; remove it")
        return self.labels_path

    def _take(self, label: PairLabel) -> None:
        if self._number(label.pair) is None or label.digests not in (None, self._digests(label.pair)):
            self._num_unknown += 1  # another scored file in this directory may share ids
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
        """Uses the first answer to each pair as its label."""
        self._first: dict[int, Pair] = {}  # pair number -> sides when first asked
        for pair in self._said:
            self._first.setdefault(self._number(pair) or 0, pair)
        self._signs = {  # pair number -> the person's verdict, for the file's side order
            number: SIGNS[verdict] * (1 if pair in self._numbers else -1)
            for number, pair in self._first.items()
            if (verdict := self._said[pair].verdict) in SIGNS
        }
        self.num_asked = len(self._first)  # labeled or skipped pairs
        of, differences = self._strata.of, self._differences
        self._strata.count((int(of[at]), credit(float(differences[at]), sign)) for at, sign in self._signs.items())

    # --- asking -------------------------------------------------------------------------------------------------------

    def next(self) -> Pair | None:
        """Returns the next pair to label, if any remain. Stays the same until answered."""
        once = [pair for at in self._signs if (pair := self._first[at]).swapped not in self._said]
        if len(self._signs) - len(once) < len(self._signs) // REPEAT_EVERY:
            return once[0].swapped
        of, sizes = self._strata.of, self._strata.sizes
        stratum = self._strata.choose(sizes - np.bincount(of[np.fromiter(self._first, int)], minlength=len(sizes)))
        numbers = [] if stratum is None else np.flatnonzero(of == stratum).tolist()
        return next((self._pairs[number] for number in numbers if number not in self._first), None)

    def next_ordered(self) -> Pair | None:
        """Returns a random pair with different judge scores, if any remain. Stays the same until answered."""
        numbers = np.flatnonzero(np.abs(self._differences) > EQUAL_REWARDS).tolist()
        return next((self._pairs[number] for number in numbers if number not in self._first), None)

    def answer(self, pair: Pair, verdict: Verdict, *, is_random: bool = False) -> None:
        """Appends a label. `undo` removes the last answer to any pair. `is_random` marks pairs from `next_ordered`.

        Raises UsageError (no such pair), RunError and DataError (append failed).
        """
        if verdict == "undo":
            if not self._said:
                return
            pair = next(reversed(self._said))
        if self._number(pair) is None:
            raise UsageError("the scored file has no such pair")
        self._append([(pair, verdict)], is_random=is_random)

    def answer_by(self, ratings: Mapping[str, float]) -> int:
        """Answers every open pair whose attempts both have a rating (by id). Returns the number of answers."""
        answers = [
            (pair, SIDES[(left > right) - (left < right)])
            for number, pair in enumerate(self._pairs)
            if number not in self._first
            and (left := ratings.get(pair.left)) is not None
            and (right := ratings.get(pair.right)) is not None
        ]
        if answers:
            self._append(answers, is_random=True)
        return len(answers)

    def _append(self, answers: Sequence[tuple[Pair, Verdict]], *, is_random: bool) -> None:
        now = time.time()
        labels = [
            PairLabel(**pair._asdict(), verdict=verdict, digests=self._digests(pair), time=now, is_random=is_random)
            for pair, verdict in answers
        ]
        with LineWriter(self._own_file()) as writer:
            writer.append_all(labels)
            writer.sync()
        for label in labels:
            self._take(label)
        self._count()

    def load_messages(self, pair: Pair) -> tuple[list[Message], list[Message]]:
        """Returns all messages of the left and right attempts. Raises DataError for invalid lines."""
        group = self._source.groups[pair.group_id]
        try:
            attempts = {each.id: read_attempt(each) for each in self._source.load(group) if each.id in pair[1:]}
        except RecursionError as error:
            raise DataError("JSON is nested too deeply", self._source.path, group.first_line) from error
        left, right = (list(chain(*attempts[name].conversations)) for name in pair[1:])
        return left, right

    # --- what follows -------------------------------------------------------------------------------------------------

    def ordered(self) -> list[tuple[float, bool]]:
        """Returns (time, judge and person agree) for random pairs that both order. Other pairs are likely errors."""
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
        """Returns a value for judge.noise.

        For 0/1 rewards: the person's better attempt should have 1, the worse attempt 0. Each label is weighted by the
        number of pairs it represents.
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
