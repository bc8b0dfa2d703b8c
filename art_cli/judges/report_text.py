"""The judge's report in words: (name, value) lines for a terminal or a page."""

from art_cli.judges.agreement import Measure
from art_cli.judges.report import Agreement, JudgeReport, Report


def report_lines(report: Report) -> list[tuple[str, str]]:
    share = f" ({report.num_without_signal / report.num_groups:.1%})" if report.num_groups else ""
    lines = [
        ("groups", f"{report.num_groups}"),
        ("trajectories", f"{report.num_trajectories}, {report.num_failed} of them failed and not judged"),
        ("groups without signal", f"{report.num_without_signal}{share}"),
        ("reward", f"mean {_number(report.reward_mean)}, spread within a group {_number(report.reward_std)}"),
        *_agreement_lines(report.agreement, f"reward against {report.gold}: "),
    ]
    for judge in report.judges:
        lines += _judge_lines(judge, report.gold)
    return lines


def _judge_lines(judge: JudgeReport, gold: str | None) -> list[tuple[str, str]]:
    lines = [("judge", f"{judge.judge} {judge.model or ''}".rstrip() + f", {max(judge.num_votes, 1)} votes an attempt")]
    if judge.order_bias is not None:
        lines.append(("  order bias", _bias_words(judge.order_bias)))
    if judge.spread is not None:
        lines.append(("  spread of a vote", f"{judge.spread:.4f} (standard deviation about its attempt's mean)"))
    lines += _agreement_lines(judge.agreement, "  score: ")
    lines += _agreement_lines(judge.one_vote, "  one vote alone: ")
    if judge.prompt_tokens is not None and judge.completion_tokens is not None:
        lines.append(("  tokens", f"{judge.prompt_tokens:,.0f} in, {judge.completion_tokens:,.0f} out"))
        cost = "unknown" if judge.cost_usd is None else f"${judge.cost_usd:.4f}"
        lines.append(("  cost", cost))
    if judge.latency_s is not None and judge.latency_p95_s is not None:
        lines.append(
            ("  latency of a vote", f"median {judge.latency_s:.2f} s, 95th percentile {judge.latency_p95_s:.2f} s")
        )
    return lines


def _bias_words(bias: Measure) -> str:
    """Example: "+0.200 [+0.195, +0.205]: the first place gets more than the last"."""
    number = f"{bias.value:+.3f} [{bias.low:+.3f}, {bias.high:+.3f}]"
    if bias.low <= 0 <= bias.high:
        return f"{number}: none that stands out from chance"
    favoured, other = ("first", "last") if bias.value > 0 else ("last", "first")
    return f"{number}: the {favoured} place gets more than the {other}"


def _agreement_lines(found: Agreement | None, prefix: str) -> list[tuple[str, str]]:
    if found is None:
        return []
    named = [
        ("pairwise accuracy", found.pairwise_accuracy),
        ("Kendall's tau-b", found.kendall_tau),
        ("best-of-group hit rate", found.best_of_group),
    ]
    return [(f"{prefix}{name}", _interval(each)) for name, each in named]


def _interval(each: Measure | None) -> str:
    return (
        "no group tells" if each is None else f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}], {each.num} groups"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
