"""Calibration: a run's workload and its machine's speed, measured from the finished steps on disk.

    scored.jsonl (tokens, begin and end of each call), seconds of the steps -> steps, Rates, RunLayout

A busy engine spends its time on passes, on sequences, on prompts and on calls. A call's duration is therefore the sum
of all work the engine did during the call. The rates are a least squares fit over all calls.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.loop.owed_groups import first_groups, group
from art_cli.loop.simulation import (
    Play,
    PlayedCall,
    PlayedGroup,
    PlayedStep,
    Rates,
    RunLayout,
    StepTimes,
    call_seconds,
    simulate,
)
from art_cli.runs.history import MAX_NUMBER, as_mapping, read_updates
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, has_signal
from art_cli.runtime.errors import DataError

Floats = npt.NDArray[np.float64]
# shares of the time to try for passes
SHARES = (0.0, *(ratio / (1 + ratio) for ratio in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32)), 1.0)
USUAL = 16  # typical number of sequences in a pass
SECTIONS = ("engine", "learner", "rollout", "judge")  # sections with the layout
NEEDED = ("sample_s", "judge_s", "train_s")  # required metrics of a step
MAX_COUNT = 10**6  # larger numbers in a configuration are damage
MOST_SPAN, SLACK_S = 1.5, 1.0  # a longer span than this, relative and absolute, means several starts
NUM_CORRECTIONS = 5  # rounds of correction; each round shrinks the error about ten times
SHORT_S = 1e-6  # lower bound on measured durations, in seconds
MAX_SLOTS = 256  # vLLM's default --max-num-seqs


class Calibration(NamedTuple):
    """A run's input for the simulation."""

    steps: list[PlayedStep]
    times: list[StepTimes]
    rates: Rates
    layout: RunLayout  # layout from the run's configuration
    correction: float  # factor on sampling rates that makes simulated and measured times equal


class _Wave(NamedTuple):
    """Overlapping calls of an attempt; times in seconds since the epoch."""

    begin: float
    end: float
    sampled: int  # tokens of all replies
    call: PlayedCall


class MeasuredStep(NamedTuple):
    played: PlayedStep
    times: StepTimes
    agent_s: float  # time for which a call blocks its agent process
    waves: list[_Wave]


def finished_steps(files: RunDir, *, last: int) -> dict[int, StepTimes]:
    """Returns the seconds of the last finished steps, without steps that lack metrics or that a restart interrupted."""
    found = dict[int, StepTimes]()
    for update in read_updates(files.metrics())[-last:]:
        if all(update.metrics.get(name, -1.0) >= 0 for name in NEEDED):
            sample_s, judge_s, train_s = (update.metrics[name] for name in NEEDED)
            played = files.scored(update.number - 1)
            ended = max((each.started_at + each.duration_s for each in played), default=0.0)
            began = min((each.started_at for each in played), default=0.0)
            if ended - began > MOST_SPAN * (sample_s + judge_s) + SLACK_S:
                continue
            rest_s = max(update.time - ended - judge_s - train_s, 0.0)
            found[update.number - 1] = StepTimes(sample_s, judge_s, train_s, rest_s)
    return found


def calibrate(files: RunDir, measured: Mapping[int, StepTimes], *, num_groups: int | None = None) -> Calibration:
    """Returns the calibration from the measured steps (step -> times), or from their first `num_groups` groups.

    Raises DataError if no step was measured, or if numbers are damaged or missing, as in runs of older versions.
    """
    if not measured or not all(0 <= seconds < MAX_NUMBER for times in measured.values() for seconds in times):
        raise DataError("no step was measured, or a step has impossible times", files.root)
    config = run_config(files)
    layout, epochs = read_layout(config), _count(as_mapping(config.get("train")), "epochs_per_step", 1)
    read = [_read_step(files, *step, layout.agents, epochs, num_groups) for step in measured.items()]
    steps, times = [each.played for each in read], [each.times for each in read]
    seen = list(itertools.chain(*(each.waves for each in read)))
    trained_token_s = _trained_token_s(steps, times, layout, without_first=0 in measured)
    rates = _rates(seen, fmean(each.agent_s for each in read), times, layout)._replace(trained_token_s=trained_token_s)
    tried = [rates, *(_with_passes(rates, share, steps, times) for share in SHARES)]
    best = min((_fit(each, steps, times, seen, layout) for each in tried), key=attrgetter("error"))
    return Calibration(steps, times, _corrected(best.rates, best.factor), layout, best.factor)


class _Fit(NamedTuple):
    rates: Rates
    factor: float  # on the sampling rates; makes simulated and measured times equal
    error: float  # standard deviation of log(simulated / measured seconds) per call


def _fit(
    rates: Rates, steps: Sequence[PlayedStep], times: Sequence[StepTimes], waves: Sequence[_Wave], layout: RunLayout
) -> _Fit:
    sampling_s, factor = sum(each.sampling_s for each in times), 1.0
    for _ in range(NUM_CORRECTIONS):
        simulated = sum(simulate(step, _corrected(rates, factor), layout).sampling_s for step in steps)
        factor = min(max(factor * sampling_s / max(simulated, 1e-9), 1 / 16), 16.0)
    guess = itertools.chain(*(call_seconds(step, _corrected(rates, factor), layout) for step in steps))
    logs = np.log(np.maximum(list(guess), SHORT_S) / np.maximum([each.end - each.begin for each in waves], SHORT_S))
    return _Fit(rates, factor, float(np.std(logs)))


def _trained_token_s(
    steps: Sequence[PlayedStep], times: Sequence[StepTimes], layout: RunLayout, *, without_first: bool
) -> float:
    """Returns the seconds per trained token, ignoring step 0, which also checks packs, if other steps exist."""
    pairs = list(zip(steps, times, strict=True))[without_first and len(steps) > 1 :]
    trained = sum(simulate(step, Rates(0, 0, 0, trained_token_s=1.0), layout).training_s for step, _ in pairs)
    return sum(each.training_s for _, each in pairs) / max(trained, 1.0)


def _with_passes(rates: Rates, share: float, steps: Sequence[PlayedStep], times: Sequence[StepTimes]) -> Rates:
    """Returns rates with `share` of the time spent on passes, and prompt tokens as expensive as reply tokens.

    If all calls have similar lengths, least squares cannot separate prompts, passes and sequences.
    """
    calls = [call for step in steps for play in step.plays for call in play.calls]
    tokens = sum(call.num * call.sampled + call.prompt for call in calls)
    token_s = sum(each.sampling_s for each in times) / max(tokens, 1)
    rest_s = (1 - share) * token_s
    return rates._replace(prompt_token_s=rest_s, pass_s=share * USUAL * token_s, sequence_s=rest_s, call_s=0.0)


def _corrected(rates: Rates, factor: float) -> Rates:
    names = ("prompt_token_s", "pass_s", "sequence_s", "call_s", "agent_s")
    return rates._replace(**{name: factor * getattr(rates, name) for name in names})


# --- the run's files --------------------------------------------------------------------------------------------------


def read_layout(config: Mapping[str, Any]) -> RunLayout:
    """Returns the layout for a resolved configuration."""
    engine, learner, rollout, judge = (as_mapping(config.get(name)) for name in SECTIONS)
    args = {name.replace("_", "-"): value for name, value in as_mapping(engine.get("args")).items()}
    slots = _count(engine, "max_batch", _count(args, "max-num-seqs", MAX_SLOTS))
    replicas, learners = _count(engine, "replicas", 1), _count(learner, "processes", 1) * _count(learner, "nodes", 1)
    concurrency = _count(rollout, "concurrency", slots * replicas)  # auto: the engine's capacity
    agents, judges = _count(rollout, "processes", 1), _count(judge, "concurrency", 0)
    return RunLayout(concurrency, replicas, slots, learners, agents, judges)


def _count(section: Mapping[str, Any], key: str, otherwise: int) -> int:
    """Reads a number from a config section; returns `otherwise` if it is missing, "auto" or out of range."""
    value = section.get(key)
    return value if isinstance(value, int) and 0 < value <= MAX_COUNT else otherwise


def _read_step(
    files: RunDir, step: int, times: StepTimes, agents: int, epochs: int, num_groups: int | None
) -> MeasuredStep:
    """Reads a step's complete groups, or the first `num_groups` groups, from the step's files.

    A run's first call waits until the agent's libraries are loaded, so step 0 is measured from that call on.
    """
    scored = files.scored(step)
    if num_groups is not None:
        scored = first_groups(scored, num_groups)
    groups = sorted(group(scored).values(), key=lambda members: members[0].started_at)
    attempts = [each for members in groups for each in members]
    _check(attempts, files.scored_path(step))
    called = min(each.started_at + min(each.spans)[0] for each in attempts if each.spans) if step == 0 else 0.0
    start_s = max(called - min(each.started_at for each in attempts), 0.0)
    waves = _waves_of_groups(groups)
    periods = [_agent_periods(each, own, called) for each, own in zip(attempts, waves, strict=True)]
    agent_s, waits = _without_queue(periods, agents)
    plays = [_play(*each) for each in zip(attempts, waves, waits, strict=True)]
    played = list[PlayedGroup]()
    for members in groups:
        first = sum(len(each.plays) for each in played)
        latency_s = max((score.latency_s or 0.0 for each in members for score in each.scores), default=0.0)
        played.append(PlayedGroup(tuple(plays[first : first + len(members)]), latency_s or times.judging_s))
    trained = sum(map(_trained_tokens, groups))
    if not trained and times.training_s:  # the loss does not compare attempts within a group
        trained = sum(map(_tokens, attempts))
    times = times._replace(sampling_s=max(times.sampling_s - start_s, 0.0))
    return MeasuredStep(PlayedStep(tuple(played), trained * epochs), times, agent_s, list(itertools.chain(*waves)))


def _waves_of_groups(groups: Sequence[Sequence[ScoredTrajectory]]) -> list[list[_Wave]]:
    """Returns each attempt's waves. The prompt prefix shared with earlier attempts counts as cached."""
    common, waves = shared_prompt([each for members in groups for each in members]), list[list[_Wave]]()
    for members in groups:
        shared = shared_prompt(members)
        for index, attempt in enumerate(members):
            waves.append(_read_waves(attempt, cached=max(common if waves else 0, shared if index else 0)))
    return waves


def _play(attempt: ScoredTrajectory, waves: Sequence[_Wave], waits: Sequence[float]) -> Play:
    """`waits` are the agent's seconds before each wave, followed by the seconds after the last wave."""
    calls = [wave.call._replace(wait_s=wait_s) for wave, wait_s in zip(waves, waits[:-1], strict=True)]
    return Play(tuple(calls), waits[-1], _tokens(attempt))


def _trained_tokens(members: Sequence[ScoredTrajectory]) -> int:
    """Returns the number of tokens the learner computes for a group; 0 without signal."""
    if not has_signal([each.reward for each in members if each.reward is not None]):
        return 0
    return max(sum(map(_tokens, members)) - shared_prompt(members) * (len(members) - 1), 0)


def _check(attempts: Sequence[ScoredTrajectory], path: Path) -> None:
    """Raises DataError for attempts that cannot be measured."""
    if not any(each.turns for each in attempts):
        raise DataError("no complete group with recorded calls, so there is nothing to measure", path)
    for each in attempts:
        if len(each.spans) != len(each.turns):
            raise DataError(f"{each.id} has no call times: an older version played it", path)
        numbers = [each.started_at, each.duration_s, *itertools.chain(*each.spans)]
        numbers += [score.latency_s or 0.0 for score in each.scores] + [turn.kept for turn in each.turns]
        if not all(0 <= number < MAX_NUMBER for number in numbers) or any(begin > end for begin, end in each.spans):
            raise DataError(f"{each.id} has impossible times or token counts", path)


def _tokens(attempt: ScoredTrajectory) -> int:
    return sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in attempt.turns)


def shared_prompt(attempts: Sequence[ScoredTrajectory]) -> int:
    """Returns the length of the prompt prefix that all attempts share; 0 for a single attempt."""
    firsts = [each.turns[0].prompt_ids for each in attempts if each.turns]
    return len(os.path.commonprefix(firsts)) if len(firsts) > 1 else 0


def _read_waves(attempt: ScoredTrajectory, cached: int) -> list[_Wave]:
    """Returns an attempt's waves. `cached` counts the cached tokens at the prompt's start."""
    began, waves = attempt.started_at, list[_Wave]()
    for (begin, end), turn in sorted(zip(attempt.spans, attempt.turns, strict=True), key=lambda each: each[0]):
        here, sampled = 0 if waves else cached, len(turn.sampled_ids)
        wave = _Wave(
            began + begin, began + end, sampled, PlayedCall(0.0, turn.kept + here, len(turn.prompt_ids) - here, sampled)
        )
        if waves and wave.begin < waves[-1].end:
            last, one, other = waves[-1], waves.pop().call, wave.call
            most = max(one.sampled, other.sampled)
            call = PlayedCall(0.0, one.cached + other.cached, one.prompt + other.prompt, most, one.num + 1)
            wave = _Wave(last.begin, max(last.end, wave.end), last.sampled + sampled, call)
        waves.append(wave)
    return waves


def _agent_periods(attempt: ScoredTrajectory, waves: Sequence[_Wave], not_before: float) -> list[tuple[float, float]]:
    """Returns (begin, seconds) for each period of agent work: before, between and after the waves."""
    begins = [max(attempt.started_at, not_before), *(wave.end for wave in waves)]
    ends = [*(wave.begin for wave in waves), attempt.started_at + attempt.duration_s]
    return [(begin, max(end - begin, 0.0)) for begin, end in zip(begins, ends, strict=True)]


# --- least squares ----------------------------------------------------------------------------------------------------


def _without_queue(periods: Sequence[Sequence[tuple[float, float]]], agents: int) -> tuple[float, list[list[float]]]:
    """Returns a call's blocking time in its agent process, and the periods' seconds without blocking.

    Computing agents slow each other down; agents waiting for a tool do not.
    """
    begin, seconds = np.array(list(itertools.chain(*periods))).T
    at_work = _during(begin, begin + seconds, np.ones(len(begin))) / np.maximum(seconds, SHORT_S)
    queue = np.maximum(at_work, 1.0) / agents
    varied = queue - queue.mean()
    slope = float(varied @ seconds) / max(float(varied @ varied), SHORT_S)
    agent_s = min(max(slope, 0.0), float(seconds.mean() / queue.mean()))
    ends = np.cumsum([len(each) for each in periods])
    waits = np.split(np.maximum(seconds - agent_s * queue, 0.0), ends[:-1])
    return agent_s, [each.tolist() for each in waits]


def _rates(waves: Sequence[_Wave], agent_s: float, times: Sequence[StepTimes], layout: RunLayout) -> Rates:
    """Fits the waves' seconds to all work done meanwhile, spread evenly over each wave, by least squares."""
    begin, end, sampled = np.array([wave[:3] for wave in waves]).T
    _, _, prompt, longest, num = np.array([wave.call for wave in waves], np.float64).T
    per_second = [amount / np.maximum(end - begin, SHORT_S) / layout.replicas for amount in (prompt, sampled, num)]
    prompts, sequences, calls = (_during(begin, end, speed) for speed in per_second)
    rates = non_negative(np.stack([prompts, longest, sequences, calls], axis=1), end - begin)
    sampling_s = sum(each.sampling_s for each in times)  # agents and gateway did all their work within this time
    call_s, agent_s = (min(one, sampling_s / len(waves)) for one in (rates[3], agent_s / layout.agents))
    rest_s = fmean(each.rest_s for each in times)
    return Rates(rates[0], rates[1], rates[2], call_s=call_s, agent_s=agent_s * layout.agents, rest_s=rest_s)


def _during(begin: Floats, end: Floats, per_second: Floats) -> Floats:
    """Returns the total work of all intervals during each interval, given each interval's speed."""
    times = np.concatenate([begin, np.maximum(end, begin + SHORT_S)])
    order = times.argsort()
    speeds = np.cumsum(np.concatenate([per_second, -per_second])[order])
    done = np.concatenate([[0.0], np.cumsum(speeds[:-1] * np.diff(times[order]))])
    return np.asarray(np.interp(end, times[order], done) - np.interp(begin, times[order], done))


def non_negative(matrix: Floats, values: Floats) -> list[float]:
    """Solves least squares with non-negative coefficients, dropping the most negative column until none is negative."""
    found = np.zeros(matrix.shape[1])
    columns = list(range(len(found)))
    while columns and min(solved := np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]) < 0:
        del columns[int(solved.argmin())]
    if columns:
        found[columns] = solved
    return [float(each) for each in found]
