"""The judge's report in words: (name, value) lines for a terminal or a page."""

import msgspec

from art_cli.judges.report.agreement import Measure
from art_cli.judges.report.judge_report import Agreement, JudgeReport, Report
from art_cli.judges.report.noise import FlipRates
from art_cli.runtime.errors import printable

Lines = list[tuple[str, str]]

NAMES = {
    "pairwise_accuracy": "pairwise accuracy",
    "pair_flips": "pairs in wrong order",
    "kendall_tau": "Kendall's tau-b",
    "best_of_group": "best-of-group hits",
}


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
    """Returns the flip rates, and the same as a value of `judge.noise`."""
    lines = [
        (f"reward against {gold}", ""),
        ("  false positives", f"{_interval(flips.false_positive)}   of {flips.num_wrong} attempts with gold 0"),
        ("  false negatives", f"{_interval(flips.false_negative)}   of {flips.num_right} attempts with gold 1"),
    ]
    if not flips.is_usable:
        return [
            *lines,
            ("  for judge.noise", "nothing: with rates that add up to 1 or more, verdicts do not depend on the truth"),
        ]
    rates = f"{{false_positive: {flips.false_positive.value:.3f}, false_negative: {flips.false_negative.value:.3f}}}"
    return [
        *lines,
        ("  for judge.noise", f"{rates}   (copied into the configuration, training allows for these flips)"),
    ]


def _judge_lines(judge: JudgeReport, gold: str | None) -> Lines:
    votes = f"{judge.num_votes} votes" if judge.num_votes > 1 else "1 vote"
    lines = [("judge", printable(f"{judge.judge} {judge.model or ''}".rstrip()) + f", {votes} an attempt")]
    if judge.order_bias is not None:
        lines.append(("  order bias", _bias_words(judge.order_bias)))
    if judge.reliability is not None:
        alone = f"   one vote alone {_interval(judge.reliability.one_vote)}"
        lines.append(("  reliability", f"{_interval(judge.reliability.all_votes)}{alone} (ICC: share that repeats)"))
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
    number = f"{bias.value:+.3f} [{bias.low:+.3f}, {bias.high:+.3f}]"
    if bias.low <= 0 <= bias.high:
        return f"{number}: none that stands out from chance"
    favoured, other = ("first", "last") if bias.value > 0 else ("last", "first")
    return f"{number}: the {favoured} place gets more than the {other}"


def _agreement_lines(found: Agreement, one_vote: Agreement | None = None) -> Lines:
    """Returns one line for each measure, with its 95 % interval and, beside it, the same measure of one vote alone."""
    alone = {} if one_vote is None else msgspec.structs.asdict(one_vote)
    lines = []
    for name, each in msgspec.structs.asdict(found).items():
        beside = f"   one vote alone {_interval(alone[name])}" if alone else ""
        groups = f"   {each.num} groups" if each else ""
        lines.append((f"    {NAMES[name]}", f"{_interval(each)}{beside}{groups}"))
    return lines


def _interval(each: Measure | None) -> str:
    return "not known from these groups" if each is None else f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
