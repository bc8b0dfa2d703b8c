"""Agreement of a reward model with its teacher, over pairs that the teacher orders. Pure functions on numbers."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from art_cli.judges.agreement import Measure, Ratio, rate
from art_cli.learners.reward.preferences import PreferenceGroup
from art_cli.runs.trajectory import EQUAL_REWARDS

ALL, HALVES = "all", ("shorter half", "longer half")


class ComparedPair(NamedTuple):
    """A pair that the teacher orders. Example: ComparedPair("s1", "s1-0", "s1-3", 1.2, 310, "ruler")"""

    unit: str  # group id, or attempt id of a single value: what is drawn again for the interval
    better: str
    worse: str
    margin: float  # score of the better attempt minus score of the worse
    length: float  # mean characters of both attempts
    kind: str


def compare(groups: Sequence[PreferenceGroup], scores: Sequence[Sequence[float]]) -> list[ComparedPair]:
    """Returns all pairs in a group, and all pairs of single values that differ."""
    found, singles = list[ComparedPair](), list[tuple[float, float, int, PreferenceGroup]]()
    for group, own in zip(groups, scores, strict=True):
        sizes = [len(str(each)) for each in group.conversations]
        for high, low, kind in group.pairs:
            margin, length = own[high] - own[low], (sizes[high] + sizes[low]) / 2
            found.append(ComparedPair(group.name, group.ids[high], group.ids[low], margin, length, kind))
        if len(group.ids) == 1 and group.values:
            singles.append((group.values[0], own[0], sizes[0], group))
    for worse, better in combinations(sorted(singles, key=lambda each: each[0]), 2):
        if better[0] - worse[0] > EQUAL_REWARDS:
            unit, length = better[3], (better[2] + worse[2]) / 2
            names = unit.name, unit.ids[0], worse[3].ids[0]
            found.append(ComparedPair(*names, better[1] - worse[1], length, f"{unit.kind} (single)"))
    return found


def measure(pairs: Sequence[ComparedPair]) -> dict[str, Measure]:
    """Returns the share of pairs in the teacher's order: of all, by kind, and of the shorter and the longer half.

    A tie of the scores counts one half. Empty without pairs.
    """
    middle = median(pair.length for pair in pairs) if pairs else 0.0
    parts = defaultdict[str, list[ComparedPair]](list)
    for pair in pairs:
        for part in (ALL, pair.kind, HALVES[pair.length > middle]):
            parts[part].append(pair)
    measures = {part: rate(_ratios(found)) for part, found in parts.items()}
    order = [ALL, *sorted({pair.kind for pair in pairs}), *HALVES]
    return {part: found for part in order if (found := measures.get(part)) is not None}


def _ratios(pairs: Sequence[ComparedPair]) -> list[Ratio]:
    credits = defaultdict[str, list[float]](list)
    for pair in pairs:
        credits[pair.unit].append(0.5 if abs(pair.margin) <= EQUAL_REWARDS else float(pair.margin > 0))
    return [Ratio(sum(each), len(each)) for each in credits.values()]
