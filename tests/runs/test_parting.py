"""The test of parting: it raises an alarm where reward and anchor part, and nowhere else, the same at any time."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.runs.history import UpdateNumbers, read_updates
from art_cli.runs.parting import (
    BASELINE,
    CHANCE,
    LEVEL,
    Beside,
    Parting,
    anchors,
    describe_parting,
    find_parting,
    onsets,
    read_beside,
)
from art_cli.runs.run_checkpoints import superseded
from art_cli.runs.run_dir import MetricsLine, RunDir
from tests.support.records.parting_series import APART, TOGETHER, series

ONSET = 25


def numbers(each: Beside, name: str = "win") -> dict[str, float]:
    """The metrics of a step, as a run records them."""
    found = {"": each.anchor, ".reward": each.reward, ".std": each.anchor_std, ".reward_std": each.reward_std}
    if each.correlation is not None:
        found[".correlation"] = each.correlation
    if each.has_levels:
        found[".gap"] = each.reward - each.anchor
    return {f"shadow/{name}{kind}": value for kind, value in found.items()} | {f"shadow/{name}.num": 64.0}


def updates(steps: list[Beside]) -> list[UpdateNumbers]:
    return [UpdateNumbers(each.step, numbers(each)) for each in steps]


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("rise", [-3.0, 0.0, 3.0, 6.0])
def test_no_alarm_where_both_rise_or_fall_together_on_any_scale(kind: str, rise: float) -> None:
    assert [find_parting(series(TOGETHER[kind], seed, num=60, rise=rise)) for seed in range(5)] == [None] * 5


def test_no_alarm_where_each_drifts_for_itself_from_step_to_step() -> None:
    found = [find_parting(series(TOGETHER["scales"], seed, num=60, follows=0.5)) for seed in range(20)]
    assert found == [None] * 20


@pytest.mark.parametrize("kind", APART)
def test_an_alarm_within_20_steps_of_an_onset_that_is_named_to_within_6(kind: str) -> None:
    for seed in range(5):
        found = find_parting(series(APART[kind], seed, num=ONSET + 30, onset=ONSET))
        assert found is not None and ONSET <= found.alarm <= ONSET + 20 and abs(found.onset - ONSET) <= 6, found


def chance_steps(draw: random.Random, num: int) -> list[Beside]:
    """Steps at the bound of the null hypothesis: each is over both bars with the probability CHANCE."""
    before = [Beside(n, 0.0, 0.0, 0.8, 1.0, 1.0, True) for n in range(1, BASELINE + 1)]
    over = [draw.random() < CHANCE for _ in range(num)]
    return before + [
        Beside(BASELINE + n, 0.0, -1.0 if is_over else 0.0, 0.1 if is_over else 0.8, 1.0, 1.0, True)
        for n, is_over in enumerate(over, 1)
    ]


def test_the_share_of_false_alarms_keeps_to_its_level_at_the_bound_of_the_null_hypothesis() -> None:
    """1,000 runs of 300 steps. By chance alone 18 or more of them would exceed a level of 1 % once in 70 times."""
    draw = random.Random(0)
    assert sum(find_parting(chance_steps(draw, 300)) is not None for _ in range(1000)) <= 1000 * LEVEL + 8


def test_each_step_gives_what_a_run_that_goes_on_gives_and_the_first_alarm_stays() -> None:
    steps = series(APART["hacked"], 1, num=60, onset=ONSET)
    found = find_parting(steps)
    assert found is not None
    for num in range(len(steps)):
        expected = found if steps[num].step >= found.alarm else None
        assert find_parting(steps[: num + 1]) == expected
    assert found.onset in onsets([each for each in steps if each.step < found.alarm])
    assert onsets(steps) == [found.onset]


def test_after_a_pause_it_takes_new_steps_to_be_certain_again() -> None:
    steps = series(APART["switched"], 0, num=60, onset=ONSET)
    found = find_parting(steps)
    assert found is not None
    later = find_parting(steps, since=found.alarm)
    assert later is not None and later.alarm >= found.alarm + 4 and later.onset == found.onset


def test_without_levels_only_the_correlation_counts() -> None:
    """RULER's means are those of groups it cannot compare."""
    draw = random.Random(0)
    steps = [Beside(n, 0.5, draw.gauss(0, 9), 0.7, 0.3, 0.3, False) for n in range(1, 50)]
    assert find_parting(steps) is None
    parted = [each if each.step < 30 else each._replace(correlation=0.0) for each in steps]
    assert find_parting(parted) == Parting("disagreement", 30, 34)
    assert "reward 0.5" not in describe_parting("win", parted, Parting("disagreement", 30, 34))


def test_a_correlation_that_falls_as_the_spread_shrinks_is_no_parting() -> None:
    """Reward = truth + noise, anchor = truth: as fewer attempts fail, less of the spread is truth."""
    steps = []
    for n in range(1, 60):
        share = min(0.99, 0.5 + n / 100)
        truth = math.sqrt(share * (1 - share))
        spread = math.hypot(truth, 0.3)
        steps.append(Beside(n, share, share, truth / spread, spread, truth, True))
    assert (steps[0].correlation or 0) > 0.8 and (steps[-1].correlation or 1) < 0.35
    assert find_parting(steps) is None


def test_an_anchor_that_all_attempts_miss_is_short_of_the_reward_and_one_that_all_have_is_not() -> None:
    """Without a spread there is no correlation, so that only the levels tell."""
    before = [Beside(n, 0.5 + n / 100, 0.5 + n / 100, 0.9, 0.4, 0.5, True) for n in range(1, 20)]
    for score, expected in ((0.0, Parting("shortfall", 20, 24)), (1.0, None)):
        assert find_parting(before + [Beside(n, 1.0, score, None, 0.0, 0.0, True) for n in range(20, 40)]) == expected


def test_the_names_and_numbers_are_read_from_the_metrics() -> None:
    steps = series(TOGETHER["judge"], 0, num=12)
    found = updates(steps)
    found[3] = UpdateNumbers(4, {"reward_mean": 0.5})
    assert anchors(found) == ["win"]
    assert read_beside(found, "win") == [each for each in steps if each.step != 4]
    assert anchors([]) == [] and read_beside(found, "other") == []


value = st.floats(-1e15, 1e15) | st.sampled_from([0.0, 1e-300, -1.0, 1.0, 1e-9, 1.1e-9])


@given(st.lists(st.lists(value, min_size=6, max_size=6), min_size=1, max_size=40), st.booleans())
def test_no_metrics_line_makes_it_fail(rows: list[list[float]], has_levels: bool) -> None:
    kinds = ("", ".reward", ".correlation", ".std", ".reward_std", ".num")
    lines = [{f"shadow/win{kind}": each for kind, each in zip(kinds, row, strict=True)} for row in rows]
    gap = {"shadow/win.gap": 1.0} if has_levels else {}
    steps = read_beside([UpdateNumbers(n, line | gap) for n, line in enumerate(lines, 1)], "win")
    found = find_parting(steps)
    assert isinstance(onsets(steps), list)
    if found is not None:
        assert found.onset <= found.alarm and describe_parting("win", steps, found)


class Counted(RunDir):
    num_reads = 0

    def metrics(self) -> list[MetricsLine]:
        self.num_reads += 1
        return super().metrics()


def test_a_run_keeps_the_checkpoint_before_the_onset(tmp_path: Path) -> None:
    """However late the alarm is, and whatever stands in the lines of other steps."""
    run, steps = Counted(tmp_path), series(APART["switched"], 0, num=60, onset=ONSET)
    run.append_metrics(0, "train", {"shadow/.num": 1.0, "shadow/x.num": math.inf, "shadow/win": 1e300})
    kept = set[int]()
    for each in steps:
        run.append_metrics(each.step - 1, "train", numbers(each))
        kept.add(each.step)
        kept -= superseded(run, kept, keep=3, keeps_best=True)
        assert run.num_reads == each.step  # once a step
    found = find_parting(read_beside(read_updates(run.metrics()), "win"))
    assert found is not None
    assert kept == {found.onset - 1, *(each.step for each in steps[-3:])}
