"""The simulation: exact small cases by hand, properties, and calibration from a run's files."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.loop.calibration import Calibration, calibrate, finished_steps, non_negative, read_layout
from art_cli.loop.simulation import (
    Play,
    PlayedCall,
    PlayedGroup,
    PlayedStep,
    Rates,
    RunLayout,
    StepTimes,
    longest_alone,
    simulate,
)
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Turn
from art_cli.runtime.errors import DataError

LAYOUT = RunLayout()
RATES = Rates(prompt_token_s=0.01, pass_s=0.1, sequence_s=0.05, trained_token_s=0.001, rest_s=2.0)


def call(prompt: int = 0, sampled: int = 0, *, cached: int = 0, wait_s: float = 0.0, num: int = 1) -> PlayedCall:
    return PlayedCall(wait_s, cached, prompt, sampled, num)


def play(*calls: PlayedCall, end_s: float = 0.0) -> Play:
    return Play(calls, end_s, sum(each.prompt + each.num * each.sampled for each in calls))


def step(*plays: Play, judge_s: float = 0.0, groups: int = 1) -> PlayedStep:
    return PlayedStep((PlayedGroup(plays, judge_s),) * groups, groups * sum(play.tokens for play in plays))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_attempt_takes_its_waits_its_prompts_and_a_pass_for_each_token() -> None:
    """0.5 + 20 x 0.01 + 0.15 + 3 + 10 x 0.01 + 2 x 0.15 + 1 = 5.25; 33 tokens are trained on; and 2 for the rest."""
    one = play(call(20, 1, wait_s=0.5), call(10, 2, wait_s=3.0, cached=21), end_s=1.0)
    assert simulate(step(one), RATES, LAYOUT) == pytest.approx((5.25, 0.0, 0.033, 2.0))
    assert longest_alone(step(one), RATES) == pytest.approx(5.25)


def test_sequences_together_share_each_pass_and_a_prompt_stops_them() -> None:
    """Of 4 and 10 tokens: 4 passes of 0.1 + 2 x 0.05, then 6 of 0.15. A prompt of 1 s at 0.75: 0.75 + 1 + 5 x 0.2."""
    assert simulate(step(play(call(0, 4)), play(call(0, 10))), RATES, LAYOUT).sampling_s == pytest.approx(1.7)
    late = play(call(100, 5, wait_s=0.75))
    assert simulate(step(play(call(0, 10)), late), RATES, LAYOUT).sampling_s == pytest.approx(2.75)
    beside = play(call(0, 10, num=2), call(0, 10))  # two sub-agents, then one call
    assert simulate(step(beside), RATES, LAYOUT).sampling_s == pytest.approx(2.0 + 1.5)


def test_full_batches_and_few_openings_let_attempts_wait_and_long_contexts_slow_passes() -> None:
    three = step(*[play(call(0, 10))] * 3)
    assert simulate(three, RATES, RunLayout(slots=1)).sampling_s == pytest.approx(3 * 1.5)
    assert simulate(three, RATES, RunLayout(concurrency=1)).sampling_s == pytest.approx(3 * 1.5)
    beside = step(play(call(0, 10, num=8)), *[play(call(0, 10))] * 16)  # eight sub-agents, whose places become free
    assert simulate(beside, RATES, RunLayout(slots=8)).sampling_s == pytest.approx(3 * 10 * 0.5)
    rates = RATES._replace(prompt_token_s=0.0, cached_token_s=1e-4)
    assert simulate(step(play(call(100, 10))), rates, LAYOUT).sampling_s == pytest.approx(10 * (0.15 + 0.0105))


def test_replicas_share_the_work_evenly_and_what_another_one_cached_is_computed_again() -> None:
    """Four of 10 tokens on two replicas: 10 passes of 0.1 + 2 x 0.05.

    A single prompt of 100 tokens takes 1 s on any number of replicas; four such prompts take 4 s on 1 replica, 1 s on
    4. Of 80 cached tokens, one of two replicas has 40.
    """
    four = step(*[play(call(0, 10))] * 4)
    assert simulate(four, RATES, RunLayout(replicas=2)).sampling_s == pytest.approx(10 * 0.2)
    assert simulate(four, RATES, RunLayout(replicas=100)).sampling_s == pytest.approx(10 * 0.15)
    for replicas in (1, 2, 100):
        found = simulate(step(play(call(100, 10))), RATES, RunLayout(replicas=replicas))
        assert found.sampling_s == pytest.approx(1.0 + 1.5)
    prompts = step(*[play(call(100, 0))] * 4)
    assert [simulate(prompts, RATES, RunLayout(replicas=n)).sampling_s for n in (1, 2, 4)] == pytest.approx(
        [4.0, 2.0, 1.0]
    )
    cached = step(play(call(20, 0, cached=80)))
    assert simulate(cached, RATES, LAYOUT).sampling_s == pytest.approx(0.2)
    assert simulate(cached, RATES, RunLayout(replicas=2)).sampling_s == pytest.approx(0.6)


def test_calls_hold_each_other_up_at_the_gateway_and_at_their_agent_process() -> None:
    four = step(*[play(call())] * 4)
    assert simulate(four, RATES._replace(call_s=1.0), LAYOUT).sampling_s == pytest.approx(4.0)
    slow = RATES._replace(agent_s=1.0)  # before the call, and after it
    assert simulate(four, slow, LAYOUT).sampling_s == pytest.approx(8.0)
    assert simulate(four, slow, RunLayout(agents=4)).sampling_s == pytest.approx(2.0)


@pytest.mark.parametrize(("judges", "seconds"), [(1, 20.0), (2, 12.0), (0, 4.0)])
def test_a_judge_that_is_bound_takes_half_as_long_if_it_is_twice_as_fast(judges: int, seconds: float) -> None:
    work, rates = step(play(call(0, 10)), judge_s=4.0, groups=5), RATES._replace(sequence_s=0.0)
    assert simulate(work, rates, RunLayout(judges=judges)).judging_s == pytest.approx(seconds)
    fast = work._replace(groups=tuple(group._replace(judge_s=2.0) for group in work.groups))
    assert simulate(fast, rates, RunLayout(judges=judges)).judging_s == pytest.approx(seconds / 2)
    beside = simulate(step(play(call(0, 10)), judge_s=1.0, groups=4), RATES, RunLayout(concurrency=1, judges=1))
    assert beside[:2] == pytest.approx((6.0, 1.0)), "the first three verdicts fall into the next attempt's time"


def test_an_update_is_divided_but_no_attempt_is() -> None:
    work, rates = step(*[play(call(0, 100))] * 3, play(call(0, 700))), RATES._replace(exchange_s=0.25)
    assert simulate(work, rates, RunLayout(learners=1)).training_s == pytest.approx(1.0)
    assert simulate(work, rates, RunLayout(learners=2)).training_s == pytest.approx(0.7 + 0.25)


# --- properties -------------------------------------------------------------------------------------------------------

lengths = st.integers(0, 60)
seconds = st.integers(0, 24).map(lambda eighths: eighths / 8)
plays = st.builds(
    lambda calls, end_s: play(*(call(p, s, wait_s=w) for p, s, w in calls), end_s=end_s),
    st.lists(st.tuples(lengths, lengths, seconds), min_size=1, max_size=3),
    seconds,
)
works = st.builds(
    lambda groups, judge_s: PlayedStep(tuple(PlayedGroup(tuple(each), judge_s) for each in groups), 100),
    st.lists(st.lists(plays, min_size=2, max_size=2), min_size=1, max_size=5),
    seconds,
)
layouts = st.builds(
    RunLayout,
    concurrency=st.integers(1, 12),
    replicas=st.integers(1, 3),
    slots=st.integers(1, 8),
    learners=st.integers(1, 3),
    agents=st.integers(1, 3),
    judges=st.integers(0, 2),
)


@settings(max_examples=30, deadline=None)
@given(works, layouts)
def test_no_step_is_shorter_than_its_longest_attempt_nor_faster_than_its_machine(
    work: PlayedStep, layout: RunLayout
) -> None:
    """Each attempt alone is a bound, and so is the work of all replicas, in which the best pass is a full one."""
    times = simulate(work, RATES, layout)
    assert times == simulate(work, RATES, layout)
    assert times.sampling_s >= longest_alone(work, RATES) - 1e-6
    sampled = sum(each.sampled for one in work.plays for each in one.calls)
    assert times.sampling_s >= sampled * (0.1 / layout.slots + 0.05) / layout.replicas - 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=12), st.integers(1, 4))
def test_more_replicas_never_slow_attempts_that_begin_together(sizes: list[int], replicas: int) -> None:
    work = step(*[play(call(each, each)) for each in sizes])
    few, many = (simulate(work, RATES, RunLayout(replicas=number)) for number in (replicas, 2 * replicas))
    assert many.sampling_s <= few.sampling_s + 1e-9


# --- calibration ------------------------------------------------------------------------------------------------------


def write_played(root: Path, *, steps: int = 2) -> RunDir:
    """Writes a run with groups of two consecutive attempts: 0.5 s wait, 0.01 s per prompt token, 0.15 s per pass, 0.25
    s at the end, 0.125 s for the judge, 0.002 s per trained token, 1.5 s for the rest."""
    run, now, draw = RunDir(root), 1.7e9, random.Random(0)
    root.mkdir(parents=True)
    run.config_path.write_text(json.dumps({"rollout": {"concurrency": 1}, "engine": {"name": "vllm"}}))
    for number in range(steps):
        began, lines, tokens = now, [], 0
        for index in range(6):
            turns, spans, at = [], [], 0.5 if number else 7.0  # the first call of a run waits for the agent's start
            for _ in range(2):
                prompt, sampled = draw.randint(5, 200), draw.randint(1, 40)
                spans.append((at, at + 0.01 * prompt + 0.15 * sampled))
                at = spans[-1][1] + 0.5
                turns.append(turn(prompt, sampled, draw))
                tokens += prompt + sampled
            lines.append(
                ScoredTrajectory(
                    id=f"s{number}-{index}", group_id=f"s{number}-g{index // 2}", group_size=2, index=index % 2,
                    turns=turns, spans=spans, started_at=now, duration_s=at - 0.25, reward=float(index % 2),
                )
            )  # fmt: skip
            now += at - 0.25
        write_lines(run.scored_path(number), lines)
        numbers = {"sample_s": now - began, "judge_s": 0.125, "train_s": 0.002 * tokens}
        now += 0.125 + 0.002 * tokens + 1.5
        with run.metrics_path.open("ab") as file:
            file.write(msgspec.json.encode(MetricsLine(step=number, split="train", metrics=numbers, time=now)) + b"\n")
    return run


def turn(prompt: int, sampled: int, draw: random.Random) -> Turn:
    return Turn(
        parent=None, kept=0, prompt_ids=[draw.randrange(10**6) for _ in range(prompt)], sampled_ids=[1] * sampled,
        logprobs=[-1.0] * sampled, raw_logprobs=None, step=0, temperature=1.0,
    )  # fmt: skip


def known(run: RunDir) -> Calibration:
    """Calibrates by the steps after the first."""
    measured = finished_steps(run, last=100)
    return calibrate(run, {number: times for number, times in measured.items() if number})


def test_a_calibration_finds_the_rates_that_a_run_was_played_with(tmp_path: Path) -> None:
    """Alone, a sequence costs a pass and itself, so only the sum of both rates can be known."""
    found = known(write_played(tmp_path / "run", steps=4))
    assert found.rates.prompt_token_s == pytest.approx(0.01, rel=0.02)
    assert found.rates.pass_s + found.rates.sequence_s == pytest.approx(0.15, rel=0.02)
    assert found.rates.trained_token_s == pytest.approx(0.002) and found.rates.rest_s == pytest.approx(1.5, abs=1e-5)
    assert found.correction == pytest.approx(1.0, abs=0.02) and found.layout == RunLayout(1, slots=256)
    played = [each for work in found.steps for one in work.plays for each in one.calls]
    scored = [each for number in (1, 2, 3) for each in RunDir(tmp_path / "run").scored(number)]
    turns = [turn for each in scored for turn in each.turns]
    assert sum(each.sampled for each in played) == sum(len(turn.sampled_ids) for turn in turns)
    assert sum(each.prompt for each in played) == sum(len(turn.prompt_ids) for turn in turns)
    for work, times in zip(found.steps, found.times, strict=True):
        assert simulate(work, found.rates, found.layout) == pytest.approx(times, rel=0.05)


def decode(waits: list[list[float]], length: int, *, concurrency: int) -> list[list[tuple[float, float]]]:
    """Returns when each call of each attempt begins and ends on an engine of passes of 0.03 + 0.0005 a sequence.

    Pass by pass; before the next one a prompt takes 0.05. All replies have `length` tokens. Each wait is followed by a
    call.
    """
    spans: list[list[tuple[float, float]]] = [[] for _ in waits]
    left, begun, now, waiting = dict[int, int](), dict[int, float](), 0.0, list(range(len(waits)))
    due = {index: waits[index][0] for index in waiting[:concurrency]}
    del waiting[:concurrency]
    while due or left:
        if not left:
            now = max(now, min(due.values()))
        for index in [index for index, at in due.items() if at <= now]:
            begun[index], left[index] = due.pop(index), length
            now += 0.05
        now += 0.03 + 0.0005 * len(left)
        left = {index: num - 1 for index, num in left.items()}
        for index in [index for index, num in left.items() if not num]:
            del left[index]
            spans[index].append((begun[index], now))
            if len(spans[index]) < len(waits[index]):
                due[index] = now + waits[index][len(spans[index])]
            elif waiting:
                following = waiting.pop(0)
                due[following] = now + waits[following][0]
    return spans


def test_calls_of_one_length_tell_what_fewer_at_once_take(tmp_path: Path) -> None:
    """Plain least squares would charge prompts for passes: the same attempts take the same time one by one."""
    draw, length = random.Random(0), 40
    waits = [[draw.uniform(0.2, 1.0) for _ in range(3)] for _ in range(32)]
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.config_path.write_text(json.dumps({"rollout": {"concurrency": 32}, "engine": {"name": "vllm"}}))
    played = decode(waits, length, concurrency=32)
    lines = [
        ScoredTrajectory(
            id=f"s1-{index}", group_id=f"s1-g{index // 8}", group_size=8, index=index % 8, started_at=1.7e9,
            turns=[turn(100, length, draw) for _ in spans], spans=spans, duration_s=spans[-1][1], reward=index % 2,
        )
        for index, spans in enumerate(played)
    ]  # fmt: skip
    write_lines(run.scored_path(1), lines)
    took = max(spans[-1][1] for spans in played)
    found = calibrate(run, {1: StepTimes(took, 0.0, 1.0, 0.1)})
    few = max(spans[-1][1] for spans in decode(waits, length, concurrency=8))
    assert few > 1.5 * took
    guess = simulate(found.steps[0], found.rates, found.layout._replace(concurrency=8))
    assert guess.sampling_s == pytest.approx(few, rel=0.2)


def test_the_start_of_the_agent_does_not_count(tmp_path: Path) -> None:
    """Of six attempts with waits of 7 s, only attempt 1 waits for the start; the rest is agent time."""
    run = write_played(tmp_path / "run", steps=1)
    found, measured = calibrate(run, finished_steps(run, last=1)), finished_steps(run, last=1)[0]
    assert found.times[0].sampling_s == pytest.approx(measured.sampling_s - 7.0)
    assert [one.calls[0].wait_s for one in found.steps[0].plays] == pytest.approx([0.0] + [7.0] * 5, abs=0.01)


def test_the_check_of_the_first_batch_counts_in_no_later_step(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run", steps=2)
    measured = finished_steps(run, last=2)
    measured[0] = measured[0]._replace(training_s=measured[0].training_s + 60.0)
    assert calibrate(run, measured).rates.trained_token_s == pytest.approx(0.002)
    assert calibrate(run, {0: measured[0]}).rates.trained_token_s > 0.01, "what is known of one step alone"


def test_an_update_that_two_processes_shared_takes_twice_as_long_on_one(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run")
    run.config_path.write_text(json.dumps({"learner": {"processes": 2}}))
    found = known(run)
    assert simulate(found.steps[0], found.rates, found.layout).training_s == pytest.approx(found.times[0].training_s)
    assert found.rates.trained_token_s == pytest.approx(2 * 0.002)


def test_steps_of_several_starts_are_left_out_and_so_are_groups_beyond_the_first(tmp_path: Path) -> None:
    """A step played long before training has no meaningful duration."""
    run = write_played(tmp_path / "run", steps=3)
    lines = [msgspec.json.decode(line, type=MetricsLine) for line in run.metrics_path.read_bytes().splitlines()]
    lines[1] = msgspec.structs.replace(
        lines[1], time=lines[1].time + 3600, metrics=lines[1].metrics | {"sample_s": 0.0}
    )
    run.metrics_path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert finished_steps(run, last=3).keys() == {0, 2}
    found = calibrate(run, {1: StepTimes(9.0, 0.1, 0.3, 1.0)}, num_groups=2)
    assert [len(work.groups) for work in found.steps] == [2]


def test_an_update_of_a_loss_that_compares_no_attempts_has_all_tokens(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run")
    same = [msgspec.structs.replace(each, reward=1.0) for each in run.scored(1)]
    write_lines(run.scored_path(1), same)
    found = known(run)
    assert simulate(found.steps[0], found.rates, found.layout).training_s == pytest.approx(found.times[0].training_s)


def test_the_number_of_slots_is_read_however_it_is_written() -> None:
    for name in ("max-num-seqs", "max_num_seqs"):
        assert read_layout({"engine": {"name": "vllm", "args": {name: 32}}}).slots == 32


def test_damaged_runs_are_refused_in_words(tmp_path: Path) -> None:
    run = write_played(tmp_path / "run")
    with pytest.raises(DataError, match="no step was measured"):
        calibrate(run, {})
    with pytest.raises(DataError, match="a step has impossible times"):
        calibrate(run, {1: StepTimes(1e300, 0.0, 0.0, 0.0)})
    hostile = {"engine": {"replicas": -1, "max_batch": 10**12}, "rollout": {"concurrency": "many"}, "learner": 7}
    hostile |= {"judge": {"concurrency": 2 * 10**9}}
    run.config_path.write_text(json.dumps(hostile))
    assert known(run).layout == RunLayout(256, slots=256), "numbers that no configuration can have are not believed"
    lines = run.scored(1)
    for spans in ([(2.0, 1.0), (3.0, 4.0)], [(0.0, 1e300), (0.0, 1.0)], [(-1.0, 1.0), (2.0, 3.0)]):
        write_lines(run.scored_path(1), [msgspec.structs.replace(each, spans=spans) for each in lines])
        with pytest.raises(DataError, match="s1-0 has impossible times or token counts"):
            known(run)
    turns = [msgspec.structs.replace(each, kept=-1) for each in lines[0].turns]
    write_lines(run.scored_path(1), [msgspec.structs.replace(each, turns=turns) for each in lines])
    with pytest.raises(DataError, match="s1-0 has impossible times or token counts"):
        known(run)
    write_lines(run.scored_path(1), [msgspec.structs.replace(each, spans=[]) for each in lines])
    with pytest.raises(DataError, match="s1-0 has no call times: an older version played it"):
        known(run)
    write_lines(run.scored_path(1), lines[:1])
    with pytest.raises(DataError, match="no complete group"):
        known(run)


def test_least_squares_without_negative_coefficients() -> None:
    import numpy as np

    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert non_negative(matrix, matrix @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])
    assert non_negative(matrix, np.array([1.0, -1.0, 0.0])) == pytest.approx([0.5, 0.0])  # of the first alone
    assert non_negative(matrix, -np.ones(3)) == [0.0, 0.0]
