"""The simulation: exact small cases by hand, properties, and calibration from a run's files."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.loop.calibration import calibrate, layout_of, non_negative
from art_cli.loop.simulation import (
    Layout,
    Play,
    PlayedCall,
    PlayedGroup,
    Rates,
    StepTimes,
    Workload,
    simulate,
    update_seconds,
)
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Turn
from art_cli.runtime.errors import DataError
from tests.support.paths import LETTERS

Art = Callable[..., tuple[int, str, str]]

LAYOUT = Layout()
RATES = Rates(prompt_token_s=0.01, pass_s=0.1, sequence_s=0.05, trained_token_s=0.001, rest_s=2.0)


def call(prompt: int = 0, sampled: int = 0, wait_s: float = 0.0, kept: int = 0, shared: int = 0) -> PlayedCall:
    return PlayedCall(wait_s=wait_s, kept=kept, prompt=prompt, shared=shared, sampled=sampled)


def play(*calls: PlayedCall, end_s: float = 0.0) -> Play:
    return Play(tuple((each,) for each in calls), end_s)


def workload(*plays: Play, judge_s: float = 0.0, groups: int = 1, common: int = 0) -> Workload:
    return Workload((PlayedGroup(plays, judge_s),) * groups, groups, common)


def only(work: Workload, rates: Rates = RATES, layout: Layout = LAYOUT) -> StepTimes:
    [times] = simulate(work, rates, layout, steps=1)
    return times


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_sequence_alone_takes_its_prompt_and_a_pass_for_each_token() -> None:
    """20 tokens x 0.01 + 10 passes x (0.1 + 0.05) = 1.7; 30 tokens are trained on: 0.03; and 2 for the rest."""
    times = only(workload(play(call(20, 10))))
    assert times == pytest.approx((1.7, 0.0, 0.03, 2.0, 3.73))


def test_agents_and_tools_add_their_time() -> None:
    """0.5 + (0.2 + 0.15) + 3 + (0.1 + 0.15 x 2) + 1 = 5.25"""
    times = only(workload(play(call(20, 1, wait_s=0.5), call(10, 2, wait_s=3.0, kept=21), end_s=1.0)))
    assert times.sampling_s == pytest.approx(5.25)


def test_sequences_together_share_each_pass() -> None:
    """Two of 4 and 10 tokens: 4 passes of 0.1 + 2 x 0.05, then 6 of 0.1 + 0.05: 0.8 + 0.9, the tail alone."""
    assert only(workload(play(call(0, 4)), play(call(0, 10)))).sampling_s == pytest.approx(1.7)


def test_a_prompt_stops_the_decoding_of_others() -> None:
    """10 passes of 0.15 alone would end at 1.5; at 0.75 a prompt of 1 s comes, then 5 passes of 0.2 together."""
    times = only(workload(play(call(0, 10)), play(call(100, 5, wait_s=0.75))))
    assert times.sampling_s == pytest.approx(0.75 + 1.0 + 5 * 0.2)


def test_cached_tokens_make_passes_longer() -> None:
    """A context of 100 + 10 / 2 tokens: each of 10 passes takes 0.15 + 0.0105."""
    times = only(workload(play(call(100, 10))), RATES._replace(prompt_token_s=0.0, cached_token_s=1e-4))
    assert times.sampling_s == pytest.approx(10 * 0.1605)


def test_a_full_batch_lets_sequences_wait() -> None:
    assert only(workload(*[play(call(0, 10))] * 3), layout=Layout(slots=1)).sampling_s == pytest.approx(3 * 1.5)
    assert only(workload(*[play(call(0, 10))] * 3), layout=Layout(concurrency=1)).sampling_s == pytest.approx(3 * 1.5)


def test_what_a_group_begins_with_is_computed_once_at_each_replica() -> None:
    """Four prompts of 100 tokens, 80 of them alike: 100 + 3 x 20 in one cache; two replicas compute 100 + 20 each."""
    work = workload(*[play(call(100, 0, shared=80))] * 4)
    assert only(work).sampling_s == pytest.approx(1.6)
    assert only(work, layout=Layout(replicas=2)).sampling_s == pytest.approx(1.2)


def test_another_group_finds_the_common_beginning() -> None:
    """Two groups of one: 100 tokens, then 100 - 30."""
    assert only(workload(play(call(100, 0)), groups=2, common=30)).sampling_s == pytest.approx(1.7)


def test_another_replica_computes_the_whole_conversation() -> None:
    """The second call finds its replica at work and goes to the idle one, which has none of its tokens."""
    busy, talk = play(call(0, 1000, wait_s=0.6)), play(call(50, 0), call(10, 0, wait_s=1.0, kept=50))
    work = workload(talk, busy)
    rates = RATES._replace(sequence_s=0.0)
    one = only(work, rates, Layout(replicas=1))
    assert one.sampling_s == pytest.approx(0.6 + 100 + 0.1)  # the prompt of 10 stops it
    assert only(work, rates, Layout(replicas=2)).sampling_s == pytest.approx(0.6 + 100)


def test_calls_beside_each_other_are_waited_for_together() -> None:
    """Both sub-agents' replies take 10 passes of 0.2; the next call begins after them."""
    beside = Play(((call(0, 10), call(0, 10)), (call(0, 10),)))
    assert only(workload(beside)).sampling_s == pytest.approx(2.0 + 1.5)


def test_calls_hold_each_other_up_at_the_gateway_and_at_their_agent_process() -> None:
    rates = RATES._replace(call_s=1.0)
    assert only(workload(*[play(call())] * 4), rates).sampling_s == pytest.approx(4.0)
    rates = RATES._replace(agent_s=1.0)  # before the call, and after it
    assert only(workload(*[play(call())] * 4), rates).sampling_s == pytest.approx(8.0)
    assert only(workload(*[play(call())] * 4), rates, Layout(agents=4)).sampling_s == pytest.approx(2.0)


def test_one_judge_takes_the_groups_one_after_the_other() -> None:
    work = workload(play(call(0, 10)), judge_s=4.0, groups=5)
    rates = RATES._replace(sequence_s=0.0)
    assert only(work, rates, Layout(judges=1)).judging_s == pytest.approx(5 * 4.0)
    assert only(work, rates, Layout(judges=2)).judging_s == pytest.approx(3 * 4.0)
    assert only(work, rates, Layout(judges=0)).judging_s == pytest.approx(4.0)


def test_groups_are_judged_while_others_are_played() -> None:
    """Attempts one by one: the first three verdicts of 1 s fall into the next attempt's 1.5 s."""
    work = workload(play(call(0, 10)), judge_s=1.0, groups=4)
    times = only(work, layout=Layout(concurrency=1, judges=1))
    assert (times.sampling_s, times.judging_s) == pytest.approx((6.0, 1.0))


@pytest.mark.parametrize("trained_s", [1.0, 5.0, 9.0])
def test_one_step_ahead_hides_the_smaller_of_sampling_and_training(trained_s: float) -> None:
    """Sampling takes 4, so from the second step on each takes max(4, training)."""
    work = workload(play(call(0, 40)))
    rates = Rates(0.0, 0.1, 0.0, update_s=trained_s)
    on_policy = simulate(work, rates, Layout(), steps=6)
    ahead = simulate(work, rates, Layout(max_staleness=1), steps=6)
    assert [each.total_s for each in on_policy] == pytest.approx([4.0 + trained_s] * 6)
    assert [each.total_s for each in ahead[:-1]] == pytest.approx([4.0 + trained_s] + [max(4.0, trained_s)] * 4)


def test_engine_and_learner_on_the_same_processors_gain_nothing_by_overlapping() -> None:
    work = workload(play(call(0, 40)))
    rates = Rates(0.0, 0.1, 0.0, update_s=4.0)
    ahead = simulate(work, rates, Layout(max_staleness=1, is_shared=True), steps=6)
    assert sum(each.total_s for each in ahead) == pytest.approx(6 * 8.0)


def test_an_update_is_divided_but_no_attempt_is() -> None:
    work = workload(*[play(call(0, 100))] * 3, play(call(0, 700)))
    rates = RATES._replace(update_s=0.5, exchange_s=0.25)
    assert update_seconds(work, work.groups, rates, 1) == pytest.approx(0.5 + 1.0)
    assert update_seconds(work, work.groups, rates, 2) == pytest.approx(0.5 + 0.7 + 0.25)
    assert update_seconds(work._replace(trained_share=0.5), work.groups, rates, 1) == pytest.approx(0.5 + 0.5)


def test_attempts_without_calls_and_without_time_end() -> None:
    work = workload(Play(()), Play(()), groups=3)
    assert [each.total_s for each in simulate(work, RATES, Layout(max_staleness=1), steps=3)] == pytest.approx(
        [2.0] * 3
    )


# --- properties -------------------------------------------------------------------------------------------------------

lengths = st.integers(0, 60)
seconds = st.integers(0, 24).map(lambda eighths: eighths / 8)
plays = st.builds(
    lambda calls, end_s: play(*(call(*each) for each in calls), end_s=end_s),
    st.lists(st.tuples(lengths, lengths, seconds), min_size=1, max_size=3),
    seconds,
)
works = st.builds(
    lambda groups, judge_s: Workload(tuple(PlayedGroup(tuple(each), judge_s) for each in groups), len(groups)),
    st.lists(st.lists(plays, min_size=2, max_size=2), min_size=1, max_size=5),
    seconds,
)
layouts = st.builds(
    Layout,
    concurrency=st.integers(1, 12),
    replicas=st.integers(1, 3),
    slots=st.integers(1, 8),
    learners=st.integers(1, 3),
    agents=st.integers(1, 3),
    judges=st.integers(0, 2),
    max_staleness=st.integers(0, 2),
    is_shared=st.booleans(),
)


def alone_s(each: Play) -> float:
    return each.end_s + sum(c.wait_s + c.prompt * 0.01 + c.sampled * 0.15 for calls in each.waves for c in calls)


@settings(max_examples=60, deadline=None)
@given(works, layouts)
def test_no_step_is_shorter_than_its_longest_attempt_nor_faster_than_its_machine(
    work: Workload, layout: Layout
) -> None:
    """Each attempt alone is a bound, and so is the work of all replicas, in which the best pass is a full one."""
    every = [each for group in work.groups for each in group.plays]
    for times in simulate(work, RATES, layout, steps=3):
        assert times.sampling_s >= max(map(alone_s, every)) - 1e-6
        sampled = sum(c.sampled for each in every for calls in each.waves for c in calls)
        best = 0.1 / layout.slots + 0.05  # seconds of a token at one replica
        assert times.sampling_s >= sampled * best / layout.replicas - 1e-6
        assert (
            times.judging_s >= -1e-9
            and times.training_s >= update_seconds(work, work.groups, RATES, layout.learners) - 1e-6
        )


@settings(max_examples=60, deadline=None)
@given(works, layouts, st.integers(0, 3))
def test_the_same_arguments_give_the_same_times_and_steps_cover_all_time(
    work: Workload, layout: Layout, seed: int
) -> None:
    times = simulate(work, RATES, layout, steps=4, seed=seed)
    assert times == simulate(work, RATES, layout, steps=4, seed=seed) and len(times) == 4
    if not layout.max_staleness:
        for each in times:
            assert each.total_s == pytest.approx(sum(each[:4]))
    assert all(each.total_s >= each.training_s + each.rest_s - 1e-6 for each in times)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=12), st.integers(1, 4))
def test_more_replicas_never_slow_attempts_that_begin_together(sizes: list[int], replicas: int) -> None:
    work = workload(*[play(call(each, each)) for each in sizes])
    few, many = (only(work, layout=Layout(replicas=number)) for number in (replicas, 2 * replicas))
    assert many.sampling_s <= few.sampling_s + 1e-9


@settings(max_examples=60, deadline=None)
@given(works, layouts, st.sampled_from(Rates._fields), st.floats(1, 4))
def test_slower_rates_lengthen_what_they_are_of(work: Workload, layout: Layout, name: str, factor: float) -> None:
    """On one attempt at a time, where no order can change."""
    rates = RATES._replace(call_s=0.1, agent_s=0.1, cached_token_s=1e-4, update_s=1.0, exchange_s=1.0)
    layout = layout._replace(concurrency=1, max_staleness=0, learners=2)
    fast = only(work, rates, layout)
    slow = only(work, rates._replace(**{name: factor * getattr(rates, name)}), layout)
    assert slow.total_s >= fast.total_s - 1e-6


@settings(max_examples=60, deadline=None)
@given(works, layouts, st.sampled_from([0.25, 0.5, 2.0, 8.0]))  # powers of two scale without rounding
def test_times_scale_with_the_unit_of_time(work: Workload, layout: Layout, unit: float) -> None:
    """All rates and waits in other units: the same events in the same order."""
    groups = tuple(
        PlayedGroup(
            tuple(
                Play(tuple((c._replace(wait_s=c.wait_s * unit),) for (c,) in each.waves), each.end_s * unit)
                for each in group.plays
            ),
            group.judge_s * unit,
        )
        for group in work.groups
    )
    before = simulate(work, RATES, layout, steps=2)
    after = simulate(work._replace(groups=groups), Rates(*(unit * rate for rate in RATES)), layout, steps=2)
    for one, other in zip(before, after, strict=True):
        assert other == pytest.approx([unit * each for each in one], rel=1e-9, abs=1e-9)


def test_each_group_is_drawn_as_often_as_the_others() -> None:
    """A step of six of four groups draws each once or twice, so its trained tokens lie between these bounds."""
    sizes = [10, 20, 30, 40]
    work = Workload(tuple(PlayedGroup((play(call(0, size)),)) for size in sizes), 6)
    trained = [each.training_s for each in simulate(work, RATES, Layout(), steps=20)]
    assert min(trained) >= 0.001 * (100 + 30) - 1e-9 and max(trained) <= 0.001 * (100 + 70) + 1e-9
    assert len({round(each, 6) for each in trained}) > 1


# --- calibration ------------------------------------------------------------------------------------------------------


def write_played(root: Path, *, steps: int = 2, concurrency: int = 1, has_spans: bool = True) -> RunDir:
    """Writes a run of groups of two attempts, one after the other: a wait of 0.5, a prompt of 0.01 a token, passes of
    0.15, and 0.25 at the end; judged within 0.125, updates of 0.002 a token, 1.5 for the rest."""
    run, now, draw = RunDir(root), 1.7e9, random.Random(0)
    root.mkdir(parents=True)
    rollout = {"concurrency": concurrency, "groups_per_step": 3}
    run.config_path.write_text(json.dumps({"rollout": rollout, "engine": {"name": "vllm", "replicas": 1}}))
    for step in range(steps):
        began, lines, tokens = now, [], 0
        for index in range(6):
            turns, spans, at = [], [], 0.5
            for _ in range(2):
                prompt, sampled = draw.randint(5, 200), draw.randint(1, 40)
                spans.append((at, at + 0.01 * prompt + 0.15 * sampled))
                at = spans[-1][1] + 0.5
                turns.append(turn(prompt, sampled, draw))
                tokens += prompt + sampled
            seconds = at - 0.25
            lines.append(attempt(f"s{step}-g{index // 2}", index % 2, turns, spans if has_spans else [], now, seconds))
            now += seconds
        write_lines(run.scored_path(step), lines)
        numbers = {"sample_s": now - began, "judge_s": 0.125, "train_s": 0.002 * tokens, "tokens_computed": tokens}
        now += 0.125 + 0.002 * tokens + 1.5
        line = MetricsLine(step=step, split="train", metrics=numbers, time=now)
        with run.metrics_path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
    return run


def turn(prompt: int, sampled: int, draw: random.Random) -> Turn:
    ids, logprobs = [draw.randrange(10**6) for _ in range(prompt)], [-1.0] * sampled
    return Turn(
        parent=None, kept=0, prompt_ids=ids, sampled_ids=[1] * sampled, logprobs=logprobs, raw_logprobs=None, step=0,
        temperature=1.0,
    )  # fmt: skip


def attempt(
    group: str, index: int, turns: list[Turn], spans: list[tuple[float, float]], started_at: float, duration_s: float
) -> ScoredTrajectory:
    return ScoredTrajectory(
        id=f"{group}-{index}", group_id=group, group_size=2, index=index, turns=turns, spans=spans,
        started_at=started_at, duration_s=duration_s, reward=1.0,
    )  # fmt: skip


def test_a_calibration_finds_the_rates_that_a_run_was_played_with(tmp_path: Path) -> None:
    """Alone, a sequence costs a pass and itself, so only the sum of both rates can be known."""
    found = calibrate(write_played(tmp_path / "run"))
    assert found.rates.prompt_token_s == pytest.approx(0.01, rel=1e-3)
    assert found.rates.pass_s + found.rates.sequence_s == pytest.approx(0.15, rel=1e-3)
    assert found.rates.trained_token_s == pytest.approx(0.002) and found.workload.trained_share == pytest.approx(1.0)
    assert found.rates.rest_s == pytest.approx(1.5, abs=1e-5) and found.correction == pytest.approx(1.0, abs=0.1)
    assert [each.judge_s for each in found.workload.groups] == [0.125] * 6 and found.workload.groups_per_step == 3
    waits = [calls[0].wait_s for group in found.workload.groups for each in group.plays for calls in each.waves]
    assert waits == pytest.approx([0.5] * 24, abs=0.01)


def test_a_calibrated_simulation_takes_as_long_as_the_run(tmp_path: Path) -> None:
    found = calibrate(write_played(tmp_path / "run", steps=4))
    guess = simulate(found.workload, found.rates, found.layout, steps=40)
    mean = [sum(column) / len(column) for column in zip(*found.times, strict=True)]
    assert [sum(column) / 40 for column in zip(*guess, strict=True)] == pytest.approx(mean, rel=0.05)


def test_an_update_that_several_processes_shared_costs_each_token_as_much_more(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run")
    run.config_path.write_text(json.dumps({"learner": {"processes": 4}}))
    assert calibrate(run).rates.trained_token_s == pytest.approx(4 * 0.002)


def test_tokens_are_conserved(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run")
    turns = [turn for step in (0, 1) for each in run.scored(step) for turn in each.turns]
    played = [c for g in calibrate(run).workload.groups for each in g.plays for calls in each.waves for c in calls]
    assert sum(c.sampled for c in played) == sum(len(turn.sampled_ids) for turn in turns)
    assert sum(c.prompt for c in played) == sum(len(turn.prompt_ids) for turn in turns)


def test_calls_that_overlap_are_one_wave(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run", steps=1)
    lines = run.scored(0)
    write_lines(run.scored_path(0), [msgspec.structs.replace(each, spans=[(0.5, 1.0), (0.75, 2.0)]) for each in lines])
    assert {len(each.waves) for g in calibrate(run).workload.groups for each in g.plays} == {1}


def test_runs_that_cannot_be_measured_are_refused_in_words(tmp_path: Path) -> None:
    run = write_played(tmp_path / "old", has_spans=False)
    with pytest.raises(DataError, match="s0-g0-0 has no times of its calls: it was played by an older version"):
        calibrate(run)
    with pytest.raises(DataError, match="no finished step to measure; let the run finish one"):
        calibrate(RunDir(tmp_path / "none"))
    with pytest.raises(DataError, match="no finished step"):
        calibrate(run, [7])
    run = write_played(tmp_path / "empty", steps=1)
    lines = run.scored(0)
    for spans in ([(2.0, 1.0), (3.0, 4.0)], [(0.0, 1e300), (0.0, 1.0)], [(-1.0, 1.0), (2.0, 3.0)]):
        write_lines(run.scored_path(0), [msgspec.structs.replace(each, spans=spans) for each in lines])
        with pytest.raises(DataError, match="has times that cannot be"):
            calibrate(run)
    write_lines(run.scored_path(0), lines[:1])
    with pytest.raises(DataError, match="no complete group"):
        calibrate(run)
    run.metrics_path.write_text(run.metrics_path.read_text().replace("train_s", "trained"))
    with pytest.raises(DataError, match="step 0 has no train_s to measure by"):
        calibrate(run)


def test_a_layout_is_what_the_configuration_says_and_never_what_no_configuration_can() -> None:
    engine = {"name": "vllm", "replicas": 8, "args": {"max-num-seqs": 64}}
    rollout, learner = {"concurrency": 1024, "processes": 8}, {"processes": 8, "nodes": 2}
    layout = layout_of({"engine": engine, "rollout": rollout, "learner": learner, "train": {"max_staleness": 1}})
    assert layout == Layout(1024, 8, 64, 16, 8, 0, 1, is_shared=False)
    assert layout_of({"engine": {"name": "embedded", "max_batch": 32}}) == Layout(slots=32, is_shared=True)
    hostile = {"engine": {"replicas": -1, "max_batch": 10**12}, "rollout": {"concurrency": "many"}, "learner": 7}
    assert layout_of(hostile) == Layout(slots=256)


def test_least_squares_without_negative_coefficients() -> None:
    import numpy as np

    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert non_negative(matrix, matrix @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])
    assert non_negative(matrix, np.array([1.0, -1.0, 0.0])) == pytest.approx([0.5, 0.0])  # of the first alone
    assert non_negative(matrix, -np.ones(3)) == [0.0, 0.0]


@pytest.mark.slow
def test_a_real_run_records_when_its_calls_were_answered_and_can_be_simulated(art: Art, tmp_path: Path) -> None:
    assert art("train", LETTERS / "config.yaml", f"runs={tmp_path}", "train.steps=2", "eval=null")[0] == 0
    run = RunDir(tmp_path / "letters")
    for step in (0, 1):
        for each in run.trajectories(step):
            assert len(each.spans) == len(each.turns) == 2
            times = [time for span in each.spans for time in span]
            assert times == sorted(times) and times[0] >= -0.01 and times[-1] <= each.duration_s + 0.05
    found = calibrate(run)
    guess = simulate(found.workload, found.rates, found.layout, steps=4)
    taken = math.fsum(each.total_s for each in found.times) / 2
    assert taken / 2 <= math.fsum(each.total_s for each in guess) / 4 <= 2 * taken
