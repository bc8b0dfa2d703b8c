"""Judge report for a scored file: order bias, vote spread, agreement with gold rewards, cost, groups without signal.

Reads only the required fields of the scored lines and writes nothing. `report_lines` renders the report as (name,
value) lines; `reports/pages/judge_page.py` renders it as a page.
"""

import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from art_cli.judges import agreement
from art_cli.judges.agreement import FlipRates, Measure, Ratio, VoteReliability, flip_rates, vote_reliability
from art_cli.runs.durable import read_lines
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import EQUAL_REWARDS, MAX_GROUP_SIZE, Score, by_group
from art_cli.runtime.errors import DataError, UsageError, printable

# in the order of Agreement's fields
MEASURES = (agreement.pairwise, agreement.pair_flips, agreement.kendall_tau, agreement.best_of_group)
MAX_POINTS = 2000  # maximum points per plot
MAX_WINDOWS, WINDOW_FILES = 5, 4  # step windows per run, and files read per window
log = logging.getLogger(__name__)
Lines = list[tuple[str, str]]
NAMES = {
    "pairwise_accuracy": "pairwise accuracy",
    "pair_flips": "pairs in wrong order",
    "kendall_tau": "Kendall's tau-b",
    "best_of_group": "best-of-group hits",
}


class ScoredRow(msgspec.Struct):
    """One scored line, reduced to the fields of the report."""

    group_id: str
    index: int = 0
    error: str | None = None
    reward: float | None = None
    returned_reward: float | None = None
    metrics: dict[str, float] = {}
    scores: list[Score] = []
    schema_version: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for numbers too large to sum, or for mismatched votes and positions."""
        for score in self.scores:
            _check_score(score)
        for value in (self.reward, self.returned_reward, *self.metrics.values()):
            if value is not None and not abs(value) <= MAX_NUMBER:
                raise ValueError(f"the number {value:g} is beyond {MAX_NUMBER:g}")


def _check_score(score: Score) -> None:
    shares = (score.spread, score.cost_usd, score.prompt_tokens, score.completion_tokens, score.latency_s)
    for value in (score.score, *score.votes, *shares):
        if value is not None and not abs(value) <= MAX_NUMBER:
            raise ValueError(f"the number {value:g} in a score is beyond {MAX_NUMBER:g}")
    if score.positions and len(score.positions) != len(score.votes):
        raise ValueError(f"a score has {len(score.votes)} votes and {len(score.positions)} positions")
    if not all(0 <= position < MAX_GROUP_SIZE for position in score.positions):
        raise ValueError("a score has a position outside of its group")


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of scores with gold rewards. A field is None when the gold is constant within every group."""

    pairwise_accuracy: Measure | None
    pair_flips: Measure | None
    kendall_tau: Measure | None
    best_of_group: Measure | None


class JudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one judge and model. Times are in seconds; costs are US dollars for the whole file, if known."""

    judge: str
    model: str | None
    num_votes: int  # maximum per attempt
    order_bias: Measure | None  # score advantage of the first position over the last
    reliability: VoteReliability | None  # None with single votes, or if all votes are equal
    spread: float | None  # standard deviation of votes around their attempt's mean, pooled
    agreement: Agreement | None  # agreement of the score (all votes) with the gold
    one_vote: Agreement | None  # agreement of single votes with the gold, pooled
    cost_usd: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    latency_s: float | None  # median time per vote, over groups
    latency_p95_s: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results for the whole file."""

    path: str
    gold: str | None
    num_groups: int
    num_trajectories: int
    num_failed: int  # trajectories with errors; not judged
    num_without_signal: int  # groups with equal rewards
    reward_mean: float | None
    reward_std: float | None  # pooled within groups
    agreement: Agreement | None  # agreement of rewards with the gold
    flips: FlipRates | None  # flip rates, if all rewards and gold values are 0 or 1
    judges: list[JudgeReport]

    def values(self) -> dict[str, float]:
        """Returns the values available to gates: `name` for the first judge, `MODEL.name` for any judge."""
        found: dict[str, float] = {}
        for number, judge in enumerate(self.judges):
            for name, value in _judge_values(judge).items():
                if number == 0:
                    found[name] = value
                found[f"{judge.model or judge.judge}.{name}"] = value
        shares = {"no_signal_share": self.num_without_signal / self.num_groups} if self.num_groups else {}
        counts = {"num_groups": float(self.num_groups), "num_without_signal": float(self.num_without_signal)}
        return found | counts | shares | _measure_values(self.agreement) | _measure_values(self.flips)


class JudgeWindow(msgspec.Struct, frozen=True):
    """One judge's results in a window of neighboring steps. Example: JudgeWindow(21, 40, JudgeReport(...))"""

    first: int
    last: int
    judge: JudgeReport


@dataclass
class PlotPoints:
    """Plot data."""

    # (position in [0, 1], vote - attempt's mean)
    positions: list[tuple[float, float]] = field(default_factory=list)
    gold: list[tuple[float, float]] = field(default_factory=list)  # (gold, reward)
    rewards: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


def read_rows(path: Path) -> dict[str, list[ScoredRow]]:
    """Returns scored lines by group, sorted by index. The last line with an index counts."""
    return by_group(read_lines(path, ScoredRow))


def make_report(path: Path, *, gold: str | None = None) -> tuple[Report, PlotPoints]:
    """Builds the report for a scored file. Raises DataError if there are no rewards, UsageError for an unknown gold."""
    groups = read_rows(path)
    judged = {name: [row for row in rows if row.reward is not None] for name, rows in groups.items()}
    if not any(judged.values()):
        raise DataError("no rewards in it; judge it first: art judge FILE -o SCORED", path)
    golds = read_gold(judged, gold) if gold else None
    rewards = {name: [row.reward for row in rows if row.reward is not None] for name, rows in judged.items() if rows}
    flat = [reward for group in rewards.values() for reward in group]
    spreads = [statistics.pvariance(group) for group in rewards.values() if len(group) > 1]
    compared = {name: {at: [reward] for at, reward in enumerate(group)} for name, group in rewards.items()}
    report = Report(
        path=str(path),
        gold=gold,
        num_groups=len(groups),
        num_trajectories=sum(map(len, groups.values())),
        num_failed=sum(row.error is not None for rows in groups.values() for row in rows),
        num_without_signal=sum(
            name not in rewards or max(rewards[name]) - min(rewards[name]) <= EQUAL_REWARDS for name in groups
        ),
        reward_mean=statistics.fmean(flat) if flat else None,
        reward_std=math.sqrt(statistics.fmean(spreads)) if spreads else None,
        agreement=_agree(compared, golds),
        flips=None if golds is None else flip_rates([*rewards.values()], [golds[name] for name in rewards]),
        judges=[_judge(*name, judged, golds) for name in _judges(judged)],
    )
    return report, _sample(judged, golds)


def judge_windows(paths: Mapping[int, Path]) -> list[JudgeWindow]:
    """Returns each judge's results in windows of steps, for judges with several votes or a known order.

    `paths` maps steps to scored files. Only a few files per window are read, so long runs stay fast. Unreadable files
    are skipped with a warning.
    """
    steps, windows = sorted(paths), []
    size = max(1, math.ceil(len(steps) / MAX_WINDOWS))
    for window in (steps[start : start + size] for start in range(0, len(steps), size)):
        groups: dict[str, list[ScoredRow]] = {}
        for step in window[:: math.ceil(size / WINDOW_FILES)]:
            try:
                groups |= read_rows(paths[step])
            except DataError as error:
                log.warning("%s; it is left out", error)
        judged = {name: [row for row in rows if row.reward is not None] for name, rows in groups.items()}
        judges = [_judge(*name, judged, None) for name in _judges(judged)]
        shown = [each for each in judges if (each.order_bias, each.reliability, each.spread) != (None, None, None)]
        windows += [JudgeWindow(window[0], window[-1], each) for each in shown]
    return windows


def read_gold(groups: dict[str, list[ScoredRow]], name: str) -> dict[str, list[float]]:
    """Returns gold rewards per group, in group order, from `returned_reward` or `metrics.NAME`. Raises UsageError."""
    found = {}
    for group_id, rows in groups.items():
        metric = name.removeprefix("metrics.")
        values = [row.returned_reward if name == "returned_reward" else row.metrics.get(metric) for row in rows]
        if any(value is None for value in values):
            metrics = sorted({each for row in rows for each in row.metrics})
            known = ["returned_reward", *(f"metrics.{each}" for each in metrics)]
            raise UsageError(
                f"--gold {name}: not every trajectory of {printable(repr(group_id))} has it; choose of "
                + ", ".join(map(printable, known))
            )
        found[group_id] = [value for value in values if value is not None]
    return found


def _judges(groups: dict[str, list[ScoredRow]]) -> list[tuple[str, str | None]]:
    """Returns (judge, model) pairs in order of appearance."""
    return list(dict.fromkeys(judge for rows in groups.values() for row in rows for judge in _scores(row)))


def _scores(row: ScoredRow) -> dict[tuple[str, str | None], Score]:
    """Returns an attempt's scores by judge. A second score with the same judge and model is named NAME (2)."""
    found: dict[tuple[str, str | None], Score] = {}
    for score in row.scores:
        name, number = score.judge, 1
        while (name, score.model) in found:
            number += 1
            name = f"{score.judge} ({number})"
        found[name, score.model] = score
    return found


def _judge(
    name: str, model: str | None, groups: dict[str, list[ScoredRow]], golds: dict[str, list[float]] | None
) -> JudgeReport:
    found = {group: _given(name, model, rows) for group, rows in groups.items()}
    given = {group: scores for group, scores in found.items() if scores}
    score_groups = [[*scores.values()] for scores in given.values()]
    scores = [score for group in score_groups for score in group]
    latencies = sorted(group[0].latency_s for group in score_groups if group[0].latency_s is not None)
    num_votes = max((len(score.votes) for score in scores), default=0)
    all_votes = {group: {at: [each.score] for at, each in attempts.items()} for group, attempts in given.items()}
    single = {
        group: {at: each.votes for at, each in attempts.items() if each.votes} for group, attempts in given.items()
    }
    return JudgeReport(
        judge=name,
        model=model,
        num_votes=num_votes,
        order_bias=agreement.measure([_order_bias(group) for group in score_groups]),
        reliability=vote_reliability([[score.votes for score in group] for group in score_groups]),
        spread=_pooled([score.spread for score in scores if score.spread is not None]),
        agreement=_agree(all_votes, golds),
        one_vote=_agree(single, golds) if num_votes > 1 else None,
        cost_usd=_total(score.cost_usd for score in scores),
        prompt_tokens=_total(score.prompt_tokens for score in scores),
        completion_tokens=_total(score.completion_tokens for score in scores),
        latency_s=statistics.median(latencies) if latencies else None,
        latency_p95_s=latencies[math.ceil(0.95 * len(latencies)) - 1] if latencies else None,
    )


def _given(name: str, model: str | None, rows: Sequence[ScoredRow]) -> dict[int, Score]:
    """Returns the judge's scores for a group, by attempt index."""
    scores = {index: _scores(row).get((name, model)) for index, row in enumerate(rows)}
    return {index: score for index, score in scores.items() if score is not None}


def _order_bias(scores: Sequence[Score]) -> Ratio:
    """Returns one group's contribution to the order bias: the score advantage of the first position over the last.

    With several votes, each attempt is compared with itself at other positions. With a single vote, attempts are
    compared with each other. Positions are drawn at random, so quality differences add noise but no bias.
    """
    points = [_places(scores, vote) for vote in range(min((len(score.positions) for score in scores), default=0))]
    if not points:
        return Ratio(0.0, 0.0)
    if len(points) == 1:
        return agreement.slope([-position for position in points[0]], [score.votes[0] for score in scores])
    parts = [
        agreement.slope([-vote[at] for vote in points], score.votes[: len(points)]) for at, score in enumerate(scores)
    ]
    return Ratio(math.fsum(part.numerator for part in parts), math.fsum(part.denominator for part in parts))


def _places(scores: Sequence[Score], vote: int) -> list[float]:
    """Returns [G] relative prompt positions in one vote: 0 first, 1 last."""
    last = max(score.positions[vote] for score in scores)
    return [score.positions[vote] / last if last else 0.0 for score in scores]


def _agree(
    values: Mapping[str, Mapping[int, Sequence[float]]], golds: dict[str, list[float]] | None
) -> Agreement | None:
    """Returns the pooled agreement of all rankings with the gold, if any.

    `values` has one value per ranking, by group and attempt index. Each group counts once, regardless of its number of
    rankings; groups with extra rounds have more rankings.
    """
    if golds is None:
        return None
    parts: list[list[Ratio]] = [[] for _ in MEASURES]
    for group, attempts in values.items():
        gold = [golds[group][at] for at in attempts]
        rankings = [*zip(*attempts.values(), strict=False)]
        for part, compare in zip(parts, MEASURES, strict=True) if attempts else ():
            ratios = [compare(ranking, gold) for ranking in rankings]
            part.append(Ratio(*(statistics.fmean(numbers) for numbers in zip(*ratios, strict=True))))
    return Agreement(*map(agreement.measure, parts))


def _pooled(deviations: Sequence[float]) -> float | None:
    return math.sqrt(statistics.fmean(d * d for d in deviations)) if deviations else None


def _total(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else math.fsum(value for value in known if value is not None)


def _judge_values(judge: JudgeReport) -> dict[str, float]:
    found: dict[str, float | None] = {"spread": judge.spread, "cost_usd": judge.cost_usd, "latency_s": judge.latency_s}
    if judge.order_bias is not None:
        found |= {"order_bias": judge.order_bias.value, "order_bias_size": abs(judge.order_bias.value)}
    if judge.reliability is not None:
        all_votes, one_vote = judge.reliability.all_votes, judge.reliability.one_vote
        found |= {"reliability": all_votes.value, "one_vote.reliability": one_vote.value}
    found |= _measure_values(judge.agreement)
    found |= {f"one_vote.{name}": value for name, value in _measure_values(judge.one_vote).items()}
    return {name: value for name, value in found.items() if value is not None}


def _measure_values(found: Agreement | FlipRates | None) -> dict[str, float]:
    fields: dict[str, Any] = {} if found is None else msgspec.structs.asdict(found)
    return {name: each.value for name, each in fields.items() if isinstance(each, Measure)}


def _sample(groups: dict[str, list[ScoredRow]], golds: dict[str, list[float]] | None) -> PlotPoints:
    """Returns plot points from each trajectory's first judge, at most MAX_POINTS per kind."""
    sample = PlotPoints()
    for group_id, rows in groups.items():
        firsts = [row.scores[0] for row in rows if row.scores and row.scores[0].positions]
        for vote in range(min((len(score.positions) for score in firsts), default=0)):
            centre = statistics.fmean(score.votes[vote] for score in firsts)
            for position, score in zip(_places(firsts, vote), firsts, strict=True):
                mean = statistics.fmean(score.votes) if len(score.votes) > 1 else centre
                sample.positions.append((position, score.votes[vote] - mean))
        sample.rewards += [row.reward for row in rows if row.reward is not None]
        sample.spreads += [score.spread for score in firsts if score.spread is not None]
        if golds is not None:
            sample.gold += [
                (true, row.reward) for true, row in zip(golds[group_id], rows, strict=True) if row.reward is not None
            ]
    for name in ("positions", "gold", "rewards", "spreads"):
        points = getattr(sample, name)
        setattr(sample, name, points[:: max(1, len(points) // MAX_POINTS)])
    return sample


def report_lines(report: Report) -> Lines:
    share = f" ({report.num_without_signal / report.num_groups:.1%})" if report.num_groups else ""
    lines = [
        ("groups", f"{report.num_groups}"),
        ("trajectories", f"{report.num_trajectories}, {report.num_failed} of them failed and not judged"),
        ("groups without signal", f"{report.num_without_signal}{share}"),
        ("reward", f"mean {_number(report.reward_mean)}, spread within a group {_number(report.reward_std)}"),
    ]
    if len(report.judges) != 1 and report.agreement is not None:
        lines += [(f"  against {report.gold}", ""), *_agreement_lines(report.agreement)]
    for judge in report.judges:
        lines += _judge_lines(judge, report.gold)
    if report.flips is not None:
        lines += _flip_lines(report.flips, str(report.gold))
    elif any(judge.reliability is not None for judge in report.judges):
        lines.append(("for judge.noise", "votes   (training believes each group as far as its votes agree)"))
    return lines


def _flip_lines(flips: FlipRates, gold: str) -> Lines:
    """Returns the flip rates, also as a `judge.noise` value."""
    lines = [
        (f"reward against {gold}", ""),
        ("  false positives", f"{interval(flips.false_positive)}   of {flips.num_wrong} attempts with gold 0"),
        ("  false negatives", f"{interval(flips.false_negative)}   of {flips.num_right} attempts with gold 1"),
    ]
    rates = f"{{false_positive: {flips.false_positive.value:.3f}, false_negative: {flips.false_negative.value:.3f}}}"
    noise = f"{rates}   (copied into the configuration, training allows for these flips)"
    useless = "nothing: with rates that add up to 1 or more, verdicts do not depend on the truth"
    return [*lines, ("  for judge.noise", noise if flips.is_usable else useless)]


def _judge_lines(judge: JudgeReport, gold: str | None) -> Lines:
    votes = f"{judge.num_votes} votes" if judge.num_votes > 1 else "1 vote"
    lines = [("judge", printable(f"{judge.judge} {judge.model or ''}".rstrip()) + f", {votes} an attempt")]
    if judge.order_bias is not None:
        lines.append(("  order bias", _bias_words(judge.order_bias)))
    if judge.reliability is not None:
        alone = f"   one vote alone {interval(judge.reliability.one_vote)}"
        lines.append(("  reliability", f"{interval(judge.reliability.all_votes)}{alone} (ICC: share that repeats)"))
    if judge.spread is not None:
        lines.append(("  spread of a vote", f"{judge.spread:.4f} (standard deviation about its attempt's mean)"))
    if judge.agreement is not None:
        lines += [(f"  against {gold}", ""), *_agreement_lines(judge.agreement, judge.one_vote)]
    if judge.prompt_tokens is not None and judge.completion_tokens is not None:
        lines.append(("  tokens", f"{judge.prompt_tokens:,.0f} in, {judge.completion_tokens:,.0f} out"))
        lines.append(("  cost", "unknown" if judge.cost_usd is None else f"${judge.cost_usd:.4f}"))
    if judge.latency_s is not None and judge.latency_p95_s is not None:
        median, slow = f"median {judge.latency_s:.2f} s", f"95th percentile {judge.latency_p95_s:.2f} s"
        lines.append(("  latency of a vote", f"{median}, {slow}"))
    return lines


def _bias_words(bias: Measure) -> str:
    """Example: "+0.200 [+0.195, +0.205]: the first place gets more than the last"."""
    number = signed(bias)
    if bias.low <= 0 <= bias.high:
        return f"{number}: none beyond chance"
    if not bias.stands_out:
        return f"{number}: {bias.num} groups are too few to rule out chance"
    favoured, other = ("first", "last") if bias.value > 0 else ("last", "first")
    return f"{number}: the {favoured} place gets more than the {other}"


def signed(each: Measure) -> str:
    """Example: "+0.200 [+0.195, +0.205]" """
    return f"{each.value:+.3f} [{each.low:+.3f}, {each.high:+.3f}]"


def _agreement_lines(found: Agreement, one_vote: Agreement | None = None) -> Lines:
    """Returns one line per measure with 95 % intervals, for all votes and for single votes."""
    alone = {} if one_vote is None else msgspec.structs.asdict(one_vote)
    lines = []
    for name, each in msgspec.structs.asdict(found).items():
        beside = f"   one vote alone {interval(alone[name])}" if alone else ""
        groups = f"   {each.num} groups" if each else ""
        lines.append((f"    {NAMES[name]}", f"{interval(each)}{beside}{groups}"))
    return lines


def interval(each: Measure | None) -> str:
    return "not known from these groups" if each is None else f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
