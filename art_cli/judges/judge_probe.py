"""Judge probes: the judge scores deliberately edited attempts, and the score shifts reveal its biases.

    groups -> plan: each group unchanged, and with one attempt edited per probe -> judge -> report

Unchanged groups are judged in every repeat, edited groups in one repeat per probe. Each repeat uses a fresh judge
without a cache and with a different seed, so all answers are independent and attempts appear in a different order.

A shift is the score of the edited attempt minus its mean unedited score. If the edit does not matter, the edited group
is just another repeat, and the edited score is a random draw from all the attempt's scores. This null hypothesis is
tested with Fisher's randomization test (1935), which is valid for any noise. A probe moves the score if its p value,
times the number of probes (Bonferroni), is at most 0.01.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec
import numpy as np

from art_cli.config.checks import ranks
from art_cli.config.sections.judge_config import (
    BlendJudgeConfig,
    CascadeJudgeConfig,
    FeedbackJudgeConfig,
    JudgeConfig,
    RulerJudgeConfig,
)
from art_cli.judges import Judge, agreement, make_judge
from art_cli.judges.agreement import Measure, Ratio
from art_cli.judges.blend import named_judges
from art_cli.judges.costs import Usage
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.judge_report import Lines, interval, signed
from art_cli.judges.probe_edits import BOTH, PROBES, JudgeProbe
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped

log = logging.getLogger(__name__)

REPEATS = 3  # judgements per unedited group; fewer cannot reveal cycles
MAX_MEMBERS = 6  # maximum panel size for comparing subsets
LEVEL = 0.01  # probability of any false finding per probe run
DRAWS = 20_000  # draws for the randomization test
ORDER = JudgeProbe(lambda a, _: None, BOTH, "stays")

Group = Sequence[Trajectory]
Repeats = Sequence[Sequence[ScoredTrajectory]]  # repeated answers for one group
Answers = dict[tuple[int, str], list[Sequence[ScoredTrajectory]]]  # (group number, probe) -> answers


class Ask(NamedTuple):
    """One group to judge. Example: Ask(7, "padding", 1, "s1-2", [...]): attempt s1-2 is padded, in repeat 1."""

    number: int  # group number
    probe: str  # "" for the unedited group
    repeat: int
    target: str  # id of the edited attempt
    group: Group


class Shift(msgspec.Struct, frozen=True):
    """One probe's result over all editable groups."""

    shift: Measure | None  # None without edited and judged attempts
    p: float  # probability of a shift this large if the edit does not matter
    verdict: str
    is_bias: bool = False
    is_unmoved: bool = False  # the score should have fallen but did not


class ProbeReport(msgspec.Struct, frozen=True):
    """Result of probing a judge."""

    num_groups: int
    num_verdicts: int
    failures: list[str]  # error messages
    usage: Usage
    shifts: dict[str, Shift]
    measures: dict[str, Measure | None]  # None if these groups cannot determine it
    cheapest: list[str]  # cheapest panel subset with agreement inside the interval of `panel`

    def values(self) -> dict[str, float]:
        """Returns the values available to gates."""
        found = self.measures | {name: each.shift for name, each in self.shifts.items()}
        counts = {
            "num_biases": float(sum(each.is_bias for each in self.shifts.values())),
            "num_unmoved": float(sum(each.is_unmoved for each in self.shifts.values())),
        }
        return {name: each.value for name, each in found.items() if each is not None} | counts


# --- asking -----------------------------------------------------------------------------------------------------------


def anew(config: JudgeConfig, repeat: int) -> JudgeConfig:
    """Returns the judge config for one repeat: no cache, a different seed, and an equal share of the budget."""
    if isinstance(config, BlendJudgeConfig):
        parts = {name: anew(each, repeat) for name, each in named_judges(config).items()}
        return config.model_copy(update={"judges": parts})
    if isinstance(config, CascadeJudgeConfig | FeedbackJudgeConfig):
        return config.model_copy(update={name: anew(each, repeat) for name, each in named_judges(config).items()})
    if not isinstance(config, RulerJudgeConfig):
        return config
    budgets = {key: value / REPEATS for key in ("budget_usd", "budget_tokens") if (value := getattr(config, key))}
    return config.model_copy(update={"cache": None, "seed": config.seed + repeat} | budgets)


def plan(number: int, group: Group, config: JudgeConfig) -> Iterator[Ask]:
    """Yields the group unchanged for each repeat, then once per probe with a randomly drawn attempt edited.

    The group order is reversed only for judges that do not shuffle.
    """
    draw = Random(number)
    yield from (Ask(number, "", repeat, "", group) for repeat in range(REPEATS))
    if not ranks(config) and len(group) > 1:
        yield Ask(number, "order", number % REPEATS, group[-1].id, group[::-1])
    for place, (name, probe) in enumerate(PROBES.items(), number):
        for at in draw.sample(range(len(group)), len(group)):
            if changed := probe.edit(group[at], [*group[:at], *group[at + 1 :]]):
                yield Ask(number, name, place % REPEATS, changed.id, [*group[:at], changed, *group[at + 1 :]])
                break


async def probe(config: JudgeConfig, directory: Path, asks: Sequence[Ask]) -> ProbeReport:
    """Asks the judge, counts failures and measures. Raises JudgeError if no unedited group was judged."""
    answers: Answers = defaultdict(list)
    failures, stopped, usage = list[str](), dict[int, JudgeStopped](), Usage()

    async def ask_one(ask: Ask, judge: Judge, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                if ask.repeat in stopped:
                    raise stopped[ask.repeat]
                scored = await judge_group(judge, ask.group)
                answers[ask.number, ask.probe].append(scored)
            except JudgeError as error:
                failures.append(str(error))
                if isinstance(error, JudgeStopped):
                    stopped[ask.repeat] = error

    for repeat in range(REPEATS):
        chosen = [ask for ask in asks if ask.repeat == repeat]
        log.info("probe: %d of %d verdicts", len(chosen), len(asks))
        judge = make_judge(anew(config, repeat), directory)
        judge.noise, slots = None, asyncio.Semaphore(judge.in_flight)
        try:
            await asyncio.gather(*(ask_one(ask, judge, slots) for ask in chosen))
        finally:
            usage += judge.usage
            await judge.close()
    groups = [repeats for (_, probe), repeats in sorted(answers.items()) if not probe]
    if not groups:
        raise JudgeError(f"no group was judged: {failures[0]}")
    return ProbeReport(len(groups), len(asks), failures, usage, _shifts(asks, answers), *_measures(groups))


# --- measuring --------------------------------------------------------------------------------------------------------


def _shifts(asks: Sequence[Ask], answers: Answers) -> dict[str, Shift]:
    rows = {name: list[Sequence[float]]() for name in ("order", *PROBES)}
    orders = [_order(repeats) for (_, probe), repeats in answers.items() if not probe]
    rows["order"] = [row for row in orders if row and math.isfinite(sum(row))]
    for ask in asks:
        before = answers.get((ask.number, ""), [])
        for judged in answers.get((ask.number, ask.probe), []) if ask.probe and before else ():
            rows[ask.probe].append(_contrasts(ask.target, [judged, *before]))
    num_probes = sum(map(bool, rows.values()))
    return {name: _shift(PROBES.get(name, ORDER), each, num_probes) for name, each in rows.items()}


def _contrasts(target: str, repeats: Repeats) -> list[float]:
    """Returns, for each repeat, the attempt's score minus the mean of its other scores; the edited repeat comes first.

    Scores are rounded to six decimals, because reward models round differently in different batches.
    """
    scores = [next(round(each.reward or 0.0, 6) for each in judged if each.id == target) for judged in repeats]
    return [score - (math.fsum(scores) - score) / (len(scores) - 1) for score in scores]


def _order(repeats: Repeats) -> list[float]:
    """Returns the score advantage of the first prompt position, for the actual votes and then for votes of other
    repeats.

    Empty for a single repeat or without recorded positions.
    """
    pairs = [
        [[*chain(*(zip(s.votes, s.positions, strict=False) for s in each.scores))] for each in judged]
        for judged in repeats
    ]
    if len(repeats) < 2 or len({len(each) for judged in pairs for each in judged} | {0}) != 2:
        return []
    votes, places = np.moveaxis(np.array(pairs, dtype=float), 3, 0)  # [repeats, attempts, votes]
    votes, places = (each - each.mean(axis=(0, 2), keepdims=True) for each in (votes, places / max(places.max(), 1)))
    turned = [np.roll(votes, turn, axis=0) for turn in range(len(repeats))]
    return [float(-(each * places).sum() / (places**2).sum()) for each in turned] if places.any() else []


def _shift(probe: JudgeProbe, rows: Sequence[Sequence[float]], num_probes: int) -> Shift:
    if (shift := agreement.measure([Ratio(row[0], 1.0) for row in rows])) is None:
        return Shift(None, 1.0, "no attempt has any")
    if (p := p_value(rows)) * num_probes > LEVEL:
        good = f"a bias if it {' or '.join(probe.bias)}" if probe.wanted == "stays" else "it should fall"
        return Shift(shift, p, f"stays ({good})", is_unmoved=probe.wanted == "falls")
    moves = "rises" if shift.value > 0 else "falls"
    if moves in probe.bias:
        return Shift(shift, p, f"{moves}: a bias", is_bias=True, is_unmoved=probe.wanted == "falls")
    return Shift(shift, p, f"{moves}: {'as it should' if moves == probe.wanted else 'no bias that pays'}")


def p_value(rows: Sequence[Sequence[float]]) -> float:
    """Returns the probability that a random value per row gives a sum as far from 0 as the first column's sum."""
    draw = np.random.default_rng(0)
    sums = np.sum([np.asarray(row)[draw.integers(len(row), size=DRAWS)] for row in rows], axis=0)
    return float(1 + np.count_nonzero(abs(sums) >= abs(sum(row[0] for row in rows)) - EQUAL_REWARDS)) / (1 + DRAWS)


def _measures(groups: Sequence[Repeats]) -> tuple[dict[str, Measure | None], list[str]]:
    """Returns all measures by name, and the cheapest panel subset."""
    votes = [[[each.reward or 0.0 for each in attempt] for attempt in zip(*group, strict=True)] for group in groups]
    means = [[fmean(each) for each in group] for group in votes]
    replies = [[[m for m in each.messages if m.get("role") == "assistant"] for each in group[0]] for group in groups]
    lengths = [[sum(len(str(m.get("content") or "")) for m in each) / 1000 for each in group] for group in replies]
    turns = [[float(len(each)) for each in group] for group in replies]
    reliability = agreement.vote_reliability(votes)
    panel, cheapest = _panel(groups)
    return {
        "reliability": reliability.one_vote if reliability else None,
        "spread": agreement.measure([Ratio(stdev(each), 1.0) for each in means if len(each) > 1]),
        "cycles_per_group": agreement.measure([cycles(group) for group in votes if min(len(group), len(group[0])) > 2]),
        "score_per_1000_characters": agreement.measure([*map(agreement.slope, lengths, means)]),
        "score_per_turn": agreement.measure([*map(agreement.slope, turns, means)]),
    } | panel, cheapest


def cycles(votes: Sequence[Sequence[float]]) -> Ratio:
    """Returns (number of attempt triples with cyclic majority preferences a > b > c > a, 1) from [A][R] votes."""
    differences = np.array(votes)[:, None] - np.array(votes)[None]
    wins = (np.sign(differences) * (abs(differences) > EQUAL_REWARDS)).sum(axis=2) > 0  # [A, A]
    found = [wins[a, b] and wins[b, c] and wins[c, a] for a, b, c in permutations(range(len(votes)), 3)]
    return Ratio(float(sum(found)) / 3, 1.0)  # each cycle is found three times


class PanelTable:
    """Panel scores by group, repeat, attempt and member."""

    def __init__(self, groups: Sequence[Repeats], names: Sequence[str]) -> None:
        attempts = [attempt for group in groups for judged in group for attempt in judged]
        self.names = names  # [M]
        self.groups = [
            np.array([[[score.score for score in each.scores] for each in judged] for judged in group])
            for group in groups
        ]
        self.costs = [sum(each.scores[at].cost_usd or 0.0 for each in attempts) for at in range(len(names))]  # [M]
        scores = np.concatenate([group.reshape(-1, len(names)) for group in self.groups])
        self.is_finite = bool(np.isfinite(scores).all())
        # The reward is the weighted mean of the members' scores, so least squares recovers the weights.
        rewards = np.array([each.reward for each in attempts])
        self.weights = np.linalg.lstsq(scores, rewards)[0] if self.is_finite else np.zeros(len(names))  # [M]

    def agree(self, subset: Sequence[int]) -> Measure | None:
        """Returns the pairwise agreement of a subset of members with the whole panel in another repeat."""
        ratios, members = [], list(subset)
        for scores in self.groups:  # [repeats, attempts, M]
            ours, whole = (scores[:, :, members] @ self.weights[members]).tolist(), (scores @ self.weights).tolist()
            pairs = [agreement.pairwise(ours[a], whole[b]) for a, b in permutations(range(len(scores)), 2)]
            ratios.append(Ratio(sum(pair.numerator for pair in pairs), sum(pair.denominator for pair in pairs)))
        return agreement.measure(ratios)

    def cheapest(self, bound: float) -> list[str]:
        """Returns the cheapest subset with agreement of at least `bound`."""
        members = range(len(self.names))
        subsets = [subset for size in members for subset in combinations(members, size + 1)]
        subsets.sort(key=lambda subset: (sum(self.costs[at] for at in subset), len(subset)))
        for subset in subsets:
            if (found := self.agree(subset)) and found.value >= bound:
                return [self.names[at] for at in subset]
        return []


def _panel(groups: Sequence[Repeats]) -> tuple[dict[str, Measure | None], list[str]]:
    """Returns the agreement of the panel and every member with the panel at another repeat, and the cheapest subset.

    Empty for single scores, unequal numbers of scores, or a panel larger than MAX_MEMBERS.
    """
    attempts = [each for group in groups for judged in group for each in judged]
    names = [f"{score.judge} {score.model or ''}".rstrip() for score in attempts[0].scores]
    if not 1 < len(names) <= MAX_MEMBERS or any(len(each.scores) != len(names) for each in attempts):
        return {}, []
    table = PanelTable(groups, names)
    if not table.is_finite:
        return {}, []
    whole = table.agree(range(len(names)))
    measures = {"panel": whole} | {f"panel.{name}": table.agree([at]) for at, name in enumerate(names)}
    return measures, table.cheapest(whole.low) if whole else []


# --- in words ---------------------------------------------------------------------------------------------------------


def probe_lines(report: ProbeReport) -> Lines:
    failed = f", {len(report.failures)} failed ({report.failures[0][:200]})" if report.failures else ""
    cost = "price unknown" if report.usage.cost_usd is None else f"${report.usage.cost_usd:.4f}"
    lines = [
        ("groups", f"{report.num_groups}, each {REPEATS} times as it is and once for each probe"),
        ("verdicts", f"{report.num_verdicts}{failed}; {report.usage.tokens:,} tokens, {cost}"),
    ]
    for name, each in report.shifts.items():
        number = f"{signed(each.shift)} of {each.shift.num} groups  " if each.shift else ""
        lines.append((f"  {name}", f"{number}{each.verdict}"))
    if not any(each.shift and abs(each.shift.value) > EQUAL_REWARDS for each in report.shifts.values()):
        spread = report.measures["spread"]
        apart = f", though its scores differ (spread {spread.value:.2g})" if spread and spread.value else ""
        lines.append(("  nothing moved", f"no change moved a score{apart}: this judge reads none of what was changed"))
    lines += [(name.replace("_", " "), interval(each)) for name, each in report.measures.items()]
    return [*lines, ("cheapest part", ", ".join(report.cheapest))] if report.cheapest else lines
