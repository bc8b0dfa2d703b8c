"""Judge report: agreement compared with hand calculations, bias with its sign, and the page."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from art_cli.config.schema import NoiseConfig
from art_cli.judges.agreement import (
    Measure,
    Ratio,
    best_of_group,
    flip_rates,
    kendall_tau,
    measure,
    pair_flips,
    pairwise,
    slope,
    vote_reliability,
)
from art_cli.judges.judge_report import make_report, report_lines
from art_cli.reports.pages.judge_page import judge_page
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Score, ScoredTrajectory, score_names, score_trajectory
from art_cli.runtime.errors import DataError, UsageError
from tests.support.judges.ruler_cases import attempt


def test_pairwise_accuracy_by_hand() -> None:
    """Gold 0 1 2 2: 5 pairs differ. Scores .1 .3 .2 .3: right (0,1) (0,2) (0,3), wrong (1,2), a tie (1,3): 3.5."""
    assert pairwise([0.1, 0.3, 0.2, 0.3], [0, 1, 2, 2]) == Ratio(3.5, 5)
    assert pairwise([0.1, 0.2], [1, 1]) == Ratio(0, 0)
    assert pairwise([], []) == Ratio(0, 0)


def test_pairs_in_the_wrong_order_by_hand() -> None:
    """Gold 0, 1, 2, 2 has five pairs that differ. Scores 0.5, 0.1, 0.5, 0.9: (0, 1) is reversed, (0, 2) is a tie."""
    assert pair_flips([0.5, 0.1, 0.5, 0.9], [0, 1, 2, 2]) == (1, 5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_kendalls_tau_b_equals_its_definition(points: list[tuple[int, int]]) -> None:
    """(C - D) / sqrt((n0 - n1) (n0 - n2)) with n1, n2 the tied pairs of each side, counted from group sizes."""
    scores, gold = [x for x, _ in points], [y for _, y in points]
    n0 = len(points) * (len(points) - 1) // 2
    tied = [sum(side.count(v) * (side.count(v) - 1) // 2 for v in set(side)) for side in (scores, gold)]
    found = kendall_tau(scores, gold)
    if n0 in tied:
        assert found == Ratio(0, 0)
        return
    pairs = [(a, b) for i, a in enumerate(points) for b in points[:i]]
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    against = sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in pairs)
    assert found.numerator == pytest.approx((agree - against) / ((n0 - tied[0]) * (n0 - tied[1])) ** 0.5)


def test_the_best_of_a_group_by_hand() -> None:
    assert best_of_group([0.1, 0.9], [0, 1]) == Ratio(1, 1)
    assert best_of_group([0.9, 0.9, 0.1], [0, 1, 1]) == Ratio(0.5, 1)  # one of two at the top, by lot
    assert best_of_group([0.9, 0.1], [1, 1]) == Ratio(0, 0)


def test_a_slope_by_hand() -> None:
    """x 0 1 2, y 1 3 8: dx -1 0 1, dy -3 -1 4: 7 / 2."""
    assert slope([0, 1, 2], [1, 3, 8]) == Ratio(7, 2)


@pytest.mark.slow
def test_an_interval_holds_its_value_nineteen_times_in_twenty() -> None:
    """Means of 40 coins with p = 0.7, 100 times: the interval holds 0.7 in 95 %, give or take 3 standard errors."""
    rng = random.Random(0)
    hits = 0
    for seed in range(100):
        found = measure([Ratio(float(rng.random() < 0.7), 1) for _ in range(40)], seed=seed)
        assert found is not None and found.low <= found.value <= found.high
        hits += found.low <= 0.7 <= found.high
    assert hits / 100 == pytest.approx(0.95, abs=0.065)


def test_groups_count_by_what_they_tell_and_none_tells_nothing() -> None:
    found = measure([Ratio(3, 6), Ratio(1, 1), Ratio(0, 0)])
    assert found is not None and found.value == pytest.approx(4 / 7) and found.num == 2
    assert measure([Ratio(0, 0)]) is None
    assert measure([Ratio(1, 2)]) == Measure(0.5, 0.5, 0.5, 1)


# --- a whole file -----------------------------------------------------------------------------------------------------


def scored_group(
    number: int, qualities: list[float], *, bias: float, votes: int, rng: random.Random, gold: str = "metrics"
) -> list[ScoredTrajectory]:
    """Scores from a judge with a known bias: half is added at the first position, half subtracted at the last."""
    orders = [rng.sample(range(len(qualities)), len(qualities)) for _ in range(votes)]
    group = []
    for index, quality in enumerate(qualities):
        positions = [order.index(index) for order in orders]
        given = [quality + bias * (0.5 - place / (len(qualities) - 1)) for place in positions]
        score = sum(given) / votes
        spread = (sum((vote - score) ** 2 for vote in given) / (votes - 1)) ** 0.5 if votes > 1 else None
        record = Score(
            judge="ruler", model="m", score=score, votes=given, positions=positions, spread=spread,
            cost_usd=0.01, prompt_tokens=100.0, completion_tokens=10.0, latency_s=float(number),
        )  # fmt: skip
        trajectory = attempt(index, [], group=f"g{number}", size=len(qualities), metrics={"quality": quality})
        group.append(score_trajectory(trajectory, score, [record]))
    return group


def write(path: Path, *, bias: float = 0.0, votes: int = 1, num_groups: int = 200, seed: int = 0) -> Path:
    rng = random.Random(seed)
    groups = [
        scored_group(number, [rng.uniform(0.2, 0.8) for _ in range(6)], bias=bias, votes=votes, rng=rng)
        for number in range(num_groups)
    ]
    write_lines(path, [each for group in groups for each in group])
    return path


@pytest.mark.parametrize("bias", [0.2, -0.1])
def test_order_bias_is_exact_where_attempts_are_compared_with_themselves(tmp_path: Path, bias: float) -> None:
    report, _ = make_report(write(tmp_path / "s.jsonl", bias=bias, votes=3))
    [judge] = report.judges
    assert judge.order_bias is not None and judge.order_bias.value == pytest.approx(bias, abs=1e-9)
    words = dict(report_lines(report))["  order bias"]
    assert words.startswith(f"{bias:+.3f}")
    assert f"the {'first' if bias > 0 else 'last'} place gets more" in words


def test_with_one_vote_order_bias_is_found_among_the_noise_of_quality(tmp_path: Path) -> None:
    """Quality is uniform over 0.6, a standard deviation of 0.17: 400 groups of 6 tell 0.2 to within about 0.02."""
    report, _ = make_report(write(tmp_path / "s.jsonl", bias=0.2, num_groups=400))
    bias = report.judges[0].order_bias
    assert bias is not None and bias.low <= 0.2 <= bias.high and bias.high - bias.low < 0.1


def test_a_few_groups_that_lean_to_one_side_accuse_nobody(tmp_path: Path) -> None:
    """Of four judges without bias, whose verdicts are noise, one has all groups on one side by chance."""
    reports = [make_report(write(tmp_path / f"{seed}", num_groups=3, seed=seed))[0] for seed in range(40)]
    said = [dict(report_lines(report))["  order bias"] for report in reports]
    assert not any("place gets more" in line for line in said) and any("3 groups are too few" in line for line in said)


def test_the_scores_of_a_panel_have_a_name_each() -> None:
    given = [("ruler", "a"), ("ruler", "b"), ("exact", None), ("ruler", "a")]
    scores = [Score(judge=judge, model=model, score=0.5) for judge, model in given]
    assert score_names(scores) == ["ruler a", "ruler b", "exact", "ruler a (2)"]
    assert score_names(scores[1:3]) == ["ruler", "exact"]


def test_two_judges_of_one_name_and_model_are_reported_both(tmp_path: Path) -> None:
    groups = [scored_group(number, [0.2, 0.8], bias=0.0, votes=1, rng=random.Random(number)) for number in range(8)]
    for each in (member for group in groups for member in group):
        [first] = each.scores
        each.scores.append(msgspec.structs.replace(first, score=1 - first.score, votes=[1 - first.score], spread=0.25))
    path = tmp_path / "two.jsonl"
    write_lines(path, [each for group in groups for each in group])
    first, second = make_report(path)[0].judges
    assert (second.judge, second.model) == (f"{first.judge} (2)", first.model)
    assert second.spread == 0.25 != first.spread


def test_a_judge_without_bias_is_not_accused(tmp_path: Path) -> None:
    report, _ = make_report(write(tmp_path / "s.jsonl", num_groups=400))
    assert "none beyond chance" in dict(report_lines(report))["  order bias"]


def test_votes_agree_better_than_one_vote(tmp_path: Path) -> None:
    report, _ = make_report(write(tmp_path / "s.jsonl", bias=0.3, votes=8), gold="metrics.quality")
    [judge] = report.judges
    assert judge.agreement and judge.one_vote
    all_votes, one = judge.agreement.pairwise_accuracy, judge.one_vote.pairwise_accuracy
    assert all_votes and one and all_votes.low > one.high
    assert report.values()["pairwise_accuracy"] == all_votes.value
    assert report.values()["one_vote.pairwise_accuracy"] == one.value


def test_one_vote_is_that_of_every_group_however_many_it_has(tmp_path: Path) -> None:
    """Four votes in most groups; one group with extra rounds has eight votes, all wrong."""

    def lines(group: str, votes: list[list[float]]) -> list[ScoredTrajectory]:
        given = [Score(judge="ruler", model="m", score=sum(each) / len(each), votes=each) for each in votes]
        made = [attempt(index, [], group=group, size=2, metrics={"quality": float(index)}) for index in range(2)]
        return [score_trajectory(each, score.score, [score]) for each, score in zip(made, given, strict=True)]

    write_lines(path := tmp_path / "s.jsonl", [
        *(line for number in range(3) for line in lines(f"g{number}", [[0.1] * 4, [0.9] * 4])),
        *lines("again", [[0.9] * 8, [0.1] * 8]),
    ])  # fmt: skip
    [judge] = make_report(path, gold="metrics.quality")[0].judges
    assert judge.one_vote and judge.one_vote.pairwise_accuracy
    assert judge.one_vote.pairwise_accuracy.value == 0.75


def test_counts_costs_and_times_are_sums_and_medians(tmp_path: Path) -> None:
    report, _ = make_report(write(tmp_path / "s.jsonl", num_groups=5, votes=2))
    [judge] = report.judges
    assert (report.num_groups, report.num_trajectories, judge.num_votes) == (5, 30, 2)
    assert judge.cost_usd == pytest.approx(0.3) and judge.prompt_tokens == 3000 and judge.completion_tokens == 300
    assert (judge.latency_s, judge.latency_p95_s) == (2.0, 4.0)


def test_groups_without_signal_and_failed_attempts_are_counted(tmp_path: Path) -> None:
    """Equal to 1e-8: groups a (equal), b (one attempt), c (all failed) tell nothing; d does."""

    def one(group: str, index: int, reward: float | None) -> ScoredTrajectory:
        error = "timeout: 3 s" if reward is None else None
        return score_trajectory(attempt(index, [], group=group, error=error), reward)

    rows = [one("a", 0, 0.5), one("a", 1, 0.5 + 1e-9), one("b", 0, 0.3), one("c", 0, None), one("d", 0, 0.1)]
    write_lines(tmp_path / "s.jsonl", [*rows, one("d", 1, 0.2), one("d", 2, None)])
    report, _ = make_report(tmp_path / "s.jsonl")
    assert (report.num_groups, report.num_without_signal, report.num_failed) == (4, 3, 2)
    assert report.values()["no_signal_share"] == 0.75


def test_a_gold_that_is_not_there_is_one_line_with_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", num_groups=1)
    with pytest.raises(UsageError, match=r"--gold metrics.win: .*metrics\.quality"):
        make_report(path, gold="metrics.win")
    (tmp_path / "t.jsonl").write_text(json.dumps({"group_id": "g", "index": 0}) + "\n")
    with pytest.raises(DataError, match="no rewards in it"):
        make_report(tmp_path / "t.jsonl")


# --- what judge.noise takes -------------------------------------------------------------------------------------------


def write_flipped(path: Path, *, false_positive: float, false_negative: float, num_groups: int = 400) -> Path:
    """Verdicts of 0 and 1 on attempts of known truth, flipped at these rates."""
    rng = random.Random(3)
    rows = []
    for number in range(num_groups):
        rate = rng.random()
        for index in range(8):
            is_right = rng.random() < rate
            is_flipped = rng.random() < (false_negative if is_right else false_positive)
            each = attempt(index, [], group=f"g{number}", size=8, metrics={"win": float(is_right)})
            rows.append(score_trajectory(each, float(is_right != is_flipped)))
    write_lines(path, rows)
    return path


def test_flip_rates_are_found_and_can_be_copied_into_a_configuration(tmp_path: Path) -> None:
    """3,200 verdicts, 10 and 25 % of them flipped: found to within 0.02, and printed as judge.noise takes them."""
    path = write_flipped(tmp_path / "s.jsonl", false_positive=0.1, false_negative=0.25)
    report, _ = make_report(path, gold="metrics.win")
    assert report.flips is not None and report.flips.num_wrong + report.flips.num_right == 3200
    for found, true in ((report.flips.false_positive, 0.1), (report.flips.false_negative, 0.25)):
        assert found.low <= true <= found.high and found.high - found.low < 0.07
        assert found.value == pytest.approx(true, abs=0.02)
    copied = dict(report_lines(report))["  for judge.noise"].partition("   ")[0]
    noise = NoiseConfig.model_validate(yaml.safe_load(copied))
    assert noise.false_positive == pytest.approx(report.flips.false_positive.value, abs=6e-4)
    assert noise.false_negative == pytest.approx(report.flips.false_negative.value, abs=6e-4)
    assert report.values()["false_negative"] == report.flips.false_negative.value


def test_flip_rates_by_hand() -> None:
    """Gold 0, 0, 1 with rewards 1, 0, 1, and gold 0, 1 with 0, 1: one false positive of three, no false negative.

    No flip in two groups: at most 1 - 0.025 ** (1 / 2), Clopper and Pearson's bound for 0 of 2.
    """
    found = flip_rates([[1, 0, 1], [0, 1]], [[0, 0, 1], [0, 1]])
    assert found is not None and (found.num_wrong, found.num_right) == (3, 2)
    assert found.false_positive.value == pytest.approx(1 / 3)
    low, high = found.false_negative.low, found.false_negative.high
    assert (found.false_negative.value, low) == (0, 0) and high == pytest.approx(1 - 0.025**0.5)
    assert (
        flip_rates([[0.5, 1]], [[0, 1]]) is flip_rates([[0, 1]], [[0.5, 1]]) is flip_rates([[0, 1]], [[1, 1]]) is None
    )


def test_a_judge_that_flips_more_than_it_tells_is_not_offered_to_be_copied(tmp_path: Path) -> None:
    path = write_flipped(tmp_path / "s.jsonl", false_positive=0.6, false_negative=0.6)
    report, _ = make_report(path, gold="metrics.win")
    assert dict(report_lines(report))["  for judge.noise"].startswith("nothing")


def test_votes_by_the_toss_of_a_coin_have_no_reliability() -> None:
    """Groups whose attempts come to equal means are the worst ones, and count."""
    draw = default_rng(3)
    found = vote_reliability(draw.integers(0, 2, size=(3000, 2, 2)).astype(float).tolist())
    assert found is not None and found.all_votes.value == pytest.approx(0, abs=0.1)
    assert found.all_votes.low <= 0 <= found.all_votes.high and found.one_vote.value == pytest.approx(0, abs=0.05)


def test_the_reliability_of_votes_is_their_intraclass_correlation() -> None:
    """Votes of deviation 1 on attempts of deviation 1: ICC(3,1) = 1 / 2, and ICC(3,4) = 1 / (1 + 1 / 4) = 4 / 5.

    What a vote gives to all attempts alike changes neither. One group is checked against 1 - 1 / F.
    """
    draw = default_rng(5)
    groups = draw.normal(size=(400, 6, 1)) + draw.normal(size=(400, 6, 4)) + 3 * draw.normal(size=(400, 1, 4))
    found = vote_reliability(groups.tolist())
    assert found is not None
    assert found.one_vote.value == pytest.approx(0.5, abs=0.05) and found.one_vote.low <= 0.5 <= found.one_vote.high
    assert found.all_votes.value == pytest.approx(0.8, abs=0.04)
    alone = vote_reliability(groups[:1].tolist())
    table = groups[0]
    residuals = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    f = 4 * table.mean(axis=1).var(ddof=1) / ((residuals**2).sum() / 15)
    assert alone is not None and alone.all_votes.value == pytest.approx(1 - 1 / f)
    assert alone.one_vote.value == pytest.approx((f - 1) / (f + 3))
    assert vote_reliability([[[1.0], [2.0]]]) is vote_reliability([[[1.0, 1.0], [1.0, 1.0]]]) is None


def test_a_judge_that_votes_is_told_to_use_its_votes(tmp_path: Path) -> None:
    report, _ = make_report(write(tmp_path / "s.jsonl", bias=0.3, votes=2, num_groups=20))
    lines = dict(report_lines(report))
    assert lines["for judge.noise"].startswith("votes ") and "ICC" in lines["  reliability"]
    assert 0 < report.values()["one_vote.reliability"] < report.values()["reliability"] < 1


# --- the page ---------------------------------------------------------------------------------------------------------


class _Tags:
    """Counts the tags of a page and remembers what loads something."""

    def __init__(self, page: str) -> None:
        from html.parser import HTMLParser

        counts: dict[str, int] = {}
        loads: list[str] = []

        class Parser(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                counts[tag] = counts.get(tag, 0) + 1
                loads.extend(str(value) for name, value in attrs if name in ("src", "href"))

        Parser().feed(page)
        self.counts, self.loads = counts, loads


def test_the_page_shows_every_line_and_four_plots_and_loads_nothing(tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "<script>s.jsonl"
    write(path, bias=0.2, votes=2, num_groups=20)
    report, sample = make_report(path, gold="metrics.quality")
    plain: dict[str, Any] = msgspec.to_builtins(report)
    page = judge_page(plain, msgspec.to_builtins(sample), report_lines(report))
    tags = _Tags(page)
    assert tags.counts["svg"] == 4 and tags.counts["tr"] == len(report_lines(report))
    assert "script" not in tags.counts and tags.loads == []
    assert tags.counts["circle"] == 20 * 6 * 2 + 20 * 6
