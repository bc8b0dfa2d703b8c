"""Parting: a sequential test for reward and anchor moving apart, with the step of onset. Pure functions.

The anchor is a shadow judge's score for the same trajectories. It may use a different scale than the reward. Two
statistics per step grow when reward and anchor part, relative to the initial steps (the baseline):

    shortfall     distance of the anchor's mean below both regression lines through the baseline, at the reward's mean,
                  in units of the anchor's within-group standard deviation. Learning that raises both, on any
                  scales, does not increase the shortfall.
    disagreement  1 - within-group correlation, corrected for a smaller spread (Thorndike's case 2), because a nearly
                  solved task lowers every correlation

A step exceeds the bar if its statistic exceeds the baseline mean by the margin and by three baseline standard
deviations. Null hypothesis: each step exceeds the bar with probability at most CHANCE, regardless of earlier steps. A
wager is multiplied by 8 at each exceeding step and by 2/9 at other steps, so its expectation never grows. New wagers
start at each step, with weights summing to 1. By Ville's inequality, the sum of wagers reaches 2 / LEVEL in at most
LEVEL / 2 of all runs, of any length. With two statistics, at most LEVEL of all runs raise a false alarm. The
onset is the step after the last zero of Page's CUSUM (1954) with half the bar as reference value.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from art_cli.config.metric_names import SHADOW
from art_cli.runs.history import UpdateNumbers

LEVEL = 0.01  # maximum share of runs with a false alarm
BASELINE = 10  # number of first steps where both vary; later steps are compared with these
# probability of exceeding the bar: maximum under the null hypothesis; probability that the wagers bet on
CHANCE, EXPECTED = 0.1, 0.8
HALF = 20  # half of the weight goes to wagers that start within this number of steps after the baseline
SHORTFALL, DISAGREEMENT = 0.5, 0.25  # margins, in standard deviations and in correlation
MIN_STD = 1e-9  # smaller deviations are rounding errors


class Beside(NamedTuple):
    """One step's reward and anchor over the same trajectories: means, correlation and deviations within groups.

    Example: Beside(7, reward=0.61, anchor=0.4, correlation=0.93, reward_std=0.3, anchor_std=0.45, has_levels=True)
    """

    step: int
    reward: float
    anchor: float
    correlation: float | None  # None when reward or anchor is constant
    reward_std: float
    anchor_std: float
    has_levels: bool  # False if either score only compares attempts within a group; its means are then meaningless


class Parting(NamedTuple):
    """An alarm. Example: Parting("disagreement", onset=31, alarm=36)"""

    kind: str
    onset: int  # the first affected step
    alarm: int  # the step when the test became certain


def anchors(updates: Sequence[UpdateNumbers]) -> list[str]:
    """Returns the names of the shadow judges in the first or last update."""
    names = {name for update in (*updates[:1], *updates[-1:]) for name in update.metrics if name.startswith(SHADOW)}
    return sorted(name[len(SHADOW) : -len(".num")] for name in names if name.endswith(".num"))


def read_beside(updates: Sequence[UpdateNumbers], anchor: str) -> list[Beside]:
    """Returns reward and anchor of each update that has both."""
    name, found = f"{SHADOW}{anchor}", []
    for update in updates:
        reward, score, reward_std, std, correlation, gap = (
            update.get(f"{name}{kind}") for kind in (".reward", "", ".reward_std", ".std", ".correlation", ".gap")
        )
        if reward is None or score is None or reward_std is None or std is None:
            continue
        if correlation is not None and (min(reward_std, std) <= MIN_STD or abs(correlation) > 1):
            correlation = None
        found.append(Beside(update.number, reward, score, correlation, reward_std, std, gap is not None))
    return found


def find_parting(steps: Sequence[Beside], *, since: int = -1) -> Parting | None:
    """Returns the first alarm. Wagers begin after step `since`; the baseline is always the first steps."""
    found = [alarm for watch in _watch(steps, since) if (alarm := watch.alarm) is not None]
    return min(found, key=lambda alarm: (alarm.alarm, alarm.onset), default=None)


def onsets(steps: Sequence[Beside]) -> list[int]:
    """Returns the alarm's onset, or else each onset suggested by the newest steps."""
    alarm = find_parting(steps)
    return [alarm.onset] if alarm else [watch.onset for watch in _watch(steps, -1) if watch.onset is not None]


def describe_parting(anchor: str, steps: Sequence[Beside], alarm: Parting) -> str:
    """Example: "reward and shadow win part since step 31 (certain at step 36, ...): correlation 0.93 in steps 1 to 10,
    0.08 since; reward 0.41 -> 0.63, shadow 0.38 -> 0.35"."""
    first, since = _baseline(steps), [each for each in steps if alarm.onset <= each.step <= alarm.alarm]
    before, now = _means(first), _means(since)
    text = (
        f"reward and shadow {anchor} part since step {alarm.onset} (certain at step {alarm.alarm}; false in at most "
        f"{LEVEL:.0%} of runs): correlation {before.correlation:.2f} in steps {first[0].step} to {first[-1].step}, "
        f"{now.correlation:.2f} since"
    )
    means = f"; reward {before.reward:.3f} -> {now.reward:.3f}, shadow {before.anchor:.3f} -> {now.anchor:.3f}"
    return text + means * first[0].has_levels


class _Watch(NamedTuple):
    onset: int | None  # the step after the last zero of CUSUM; None while CUSUM is 0
    alarm: Parting | None


def _watch(steps: Sequence[Beside], since: int) -> Iterator[_Watch]:
    """Yields the state of both statistics; nothing before the baseline is complete."""
    first = _baseline(steps)
    if len(first) < BASELINE:
        return
    means, last = _means(first), first[-1].step
    if first[0].has_levels:
        yield _follow("shortfall", [(each.step, _shortfall(each, means)) for each in steps], SHORTFALL, last, since)
    if means.correlation > 0:
        varying = [(each, each.correlation) for each in steps if each.correlation is not None]
        numbers = [(each.step, _disagreement(each, correlation, means)) for each, correlation in varying]
        yield _follow("disagreement", numbers, min(DISAGREEMENT, means.correlation / 2), last, since)


def _baseline(steps: Sequence[Beside]) -> list[Beside]:
    return [each for each in steps if each.correlation is not None][:BASELINE]


def _follow(kind: str, numbers: Sequence[tuple[int, float]], margin: float, last: int, since: int) -> _Watch:
    """Tests the (step, value) pairs after the baseline, which ends at step `last`."""
    before = [value for step, value in numbers if step <= last]
    mean, bar = fmean(before), max(margin, 3 * stdev(before))
    onset, cusum, wagers, num = None, 0.0, 0.0, 0
    for step, value in numbers[len(before) :]:
        excess = value - mean
        cusum = max(0.0, cusum + excess - bar / 2)
        onset = None if cusum == 0 else step if onset is None else onset
        if step <= since:
            continue
        num += 1
        ratio = EXPECTED / CHANCE if excess > bar else (1 - EXPECTED) / (1 - CHANCE)
        wagers = (wagers + HALF / ((num + HALF - 1) * (num + HALF))) * ratio
        if wagers >= 2 / LEVEL:
            assert onset is not None, "a step over the bar raises CUSUM"
            return _Watch(onset, Parting(kind, onset, step))
    return _Watch(onset, None)


class _Means(NamedTuple):
    reward: float
    anchor: float
    correlation: float  # mean over the steps with a correlation; 0.0 when no step has one
    reward_std: float
    anchor_std: float


def _means(steps: Sequence[Beside]) -> _Means:
    known = [each.correlation for each in steps if each.correlation is not None]
    columns = zip(*((each.reward, each.anchor, each.reward_std, each.anchor_std) for each in steps), strict=True)
    reward, anchor, *stds = map(fmean, columns)
    return _Means(reward, anchor, fmean(known) if known else 0.0, *stds)


def _shortfall(each: Beside, first: _Means) -> float:
    slope = min(1.0, max(0.1, first.correlation))
    rise = (each.reward - first.reward) / first.reward_std
    return min(slope * rise, rise / slope) - (each.anchor - first.anchor) / first.anchor_std


def _disagreement(each: Beside, correlation: float, first: _Means) -> float:
    wider = max(1.0, first.reward_std / each.reward_std, first.anchor_std / each.anchor_std)
    return 1 - correlation * wider / math.sqrt(1 + correlation**2 * (wider**2 - 1))
