"""Calibration: what a run played, and how fast its machine was, from the steps that it has on disk.

    trajectories.jsonl (tokens, and when each call came and was answered), metrics.jsonl -> Workload, Rates, Layout

An engine with work spends its time on passes, on the sequences in them, on prompts and on calls. So the time of a call
is the sum of what the engine did meanwhile for all calls, and the rates are the least squares of that over all calls.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.loop.owed_groups import group
from art_cli.loop.simulation import Layout, Play, PlayedCall, PlayedGroup, Rates, StepTimes, Workload, simulate
from art_cli.runs.history import MAX_NUMBER, UpdateNumbers, read_updates
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import DataError

Floats = npt.NDArray[np.float64]
NEEDED = ("sample_s", "judge_s", "train_s", "tokens_computed")  # metrics of a step
MAX_COUNT = 10**6  # larger numbers of a configuration are damage
NUM_CORRECTIONS, NUM_SIMULATED = 3, 3  # times that the correction is found anew, and steps simulated for it
MAX_SLOTS = 256  # vLLM's --max-num-seqs where the configuration has none


class Calibration(NamedTuple):
    """A run as the simulation takes it."""

    workload: Workload
    rates: Rates
    layout: Layout  # of the run's configuration
    times: list[StepTimes]  # what its steps took
    correction: float  # factor on the rates of sampling with which the simulation of these steps takes what they took


class _Attempt(NamedTuple):
    play: Play
    first: list[int]  # its first prompt
    cached: int  # tokens of that which an attempt before it left in the cache
    spans: Floats  # [call, 2] begin and end, seconds since the epoch
    waits: list[tuple[float, float]]  # when its agent began to work, and for how long: before each wave, and at the end


def calibrate(files: RunDir, steps: Sequence[int] | None = None) -> Calibration:
    """Returns what follows from the run's finished steps, or from those of `steps`.

    Raises DataError: none is finished, or the numbers of one are damaged or missing, as in runs of older versions.
    """
    known = {each.number - 1: each for each in read_updates(files.metrics())}
    updates = [update for step, update in known.items() if steps is None or step in steps]
    if not updates:
        raise DataError("no finished step to measure; let the run finish one", files.metrics_path)
    config = run_config(files)
    layout, groups, times, judge_s = layout_of(config), list[list[_Attempt]](), list[StepTimes](), list[float]()
    for update in updates:
        scored = _read_step(files, update)
        times.append(_times(scored, update, known.get(update.number - 2)))
        groups += [[_read_attempt(each, members) for each in members] for members in scored]
        judge_s += [_judge_s(members, update.metrics["judge_s"]) for members in scored]
    agent_s, plays = _without_queue([each for members in groups for each in members], layout.agents)
    played = (tuple(itertools.islice(plays, len(members))) for members in groups)
    prefix = os.path.commonprefix([each.first for members in groups for each in members if each.first])
    workload = Workload(tuple(map(PlayedGroup, played, judge_s)), round(len(groups) / len(times)), len(prefix))
    computed = _count(config.get("train"), "epochs_per_step", 1) * sum(
        each.metrics["tokens_computed"] for each in updates
    )
    tokens = sum(play.tokens for group in workload.groups for play in group.plays)
    work = _work(groups, len(prefix), layout.replicas)
    prompt, pass_, sequence, call = non_negative(work[:, 1:], work[:, 0])
    sample_s = sum(each.sampling_s for each in times)  # within it agents and gateway did all their work
    rates = Rates(
        *(prompt, pass_, sequence),
        call_s=min(call, sample_s / len(work)),
        agent_s=min(agent_s, layout.agents * sample_s / sum(len(each.waits) for members in groups for each in members)),
        trained_token_s=layout.learners * sum(each.training_s for each in times) / max(computed, 1),
        rest_s=float(np.mean([each.rest_s for each in times])),
    )
    workload = workload._replace(trained_share=computed / max(tokens, 1))
    factor = _correction(workload, rates, layout, sample_s / len(times))
    return Calibration(workload, _corrected(rates, factor), layout, times, factor)


def _corrected(rates: Rates, factor: float) -> Rates:
    names = ("prompt_token_s", "pass_s", "sequence_s", "call_s", "agent_s")
    return rates._replace(**{name: factor * getattr(rates, name) for name in names})


def _correction(workload: Workload, rates: Rates, layout: Layout, sample_s: float) -> float:
    """Returns the factor on the rates of sampling with which steps take `sample_s`, or the nearest within [1/4, 4]."""
    factor = 1.0
    for _ in range(NUM_CORRECTIONS):
        times = simulate(workload, _corrected(rates, factor), layout, steps=NUM_SIMULATED)
        factor *= sample_s * len(times) / max(sum(each.sampling_s for each in times), 1e-9)
        factor = min(max(factor, 0.25), 4.0)
    return factor


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Returns the layout of a resolved configuration, with what it leaves open as one machine has it."""
    engine, learner, rollout = (config.get(name) for name in ("engine", "learner", "rollout"))
    args = engine.get("args") if isinstance(engine, Mapping) else None
    return Layout(
        concurrency=_count(rollout, "concurrency", 128),
        replicas=_count(engine, "replicas", 1),
        slots=_count(engine, "max_batch", _count(args, "max-num-seqs", MAX_SLOTS)),
        learners=_count(learner, "processes", 1) * _count(learner, "nodes", 1),
        agents=_count(rollout, "processes", 1),
        judges=_count(config.get("judge"), "concurrency", 0),
        max_staleness=_count(config.get("train"), "max_staleness", 0),
        is_shared=isinstance(engine, Mapping) and engine.get("name") == "embedded",
    )


def _count(section: Any, key: str, otherwise: int) -> int:
    """Returns a number of a section, or `otherwise` if it has none, or one that no configuration can have."""
    value = section.get(key) if isinstance(section, Mapping) else None
    return value if isinstance(value, int) and 0 < value <= MAX_COUNT else otherwise


def _read_step(files: RunDir, update: UpdateNumbers) -> list[list[ScoredTrajectory]]:
    """Returns the complete groups of a step, in the order of its attempts' beginnings."""
    step, path = update.number - 1, files.scored_path(update.number - 1)
    if missing := [name for name in NEEDED if not update.metrics.get(name, -1) >= 0]:
        raise DataError(f"step {step} has no {missing[0]} to measure by", files.metrics_path)
    scored = sorted(group(files.scored(step)).values(), key=lambda members: members[0].started_at)
    if not any(each.turns for members in scored for each in members):
        raise DataError("no complete group with recorded calls, so there is nothing to measure", path)
    for each in (each for members in scored for each in members):
        times = [each.started_at, each.duration_s, *(time for span in each.spans for time in span)]
        if len(each.spans) != len(each.turns):
            raise DataError(f"{each.id} has no times of its calls: it was played by an older version", path)
        if not all(0 <= time < MAX_NUMBER for time in times) or any(begin > end for begin, end in each.spans):
            raise DataError(f"{each.id} has times that cannot be", path)
    return scored


def _times(
    scored: Sequence[Sequence[ScoredTrajectory]], update: UpdateNumbers, last: UpdateNumbers | None
) -> StepTimes:
    """Returns what a step took, which may have begun before the `last` one was done."""
    before = 0.0 if last is None else last.time
    sample_s, judge_s, train_s = (update.metrics[name] for name in NEEDED[:3])
    ended = max(each.started_at + each.duration_s for members in scored for each in members)
    rest_s = max(update.time - max(ended + judge_s, before) - train_s, 0.0)
    return StepTimes(sample_s, judge_s, train_s, rest_s, update.time - max(ended - sample_s, before))


def _judge_s(members: Sequence[ScoredTrajectory], otherwise: float) -> float:
    """Returns how long the judge of a group took, by its votes, or by what was left to judge after the last attempt."""
    known = [score.latency_s for each in members for score in each.scores if score.latency_s is not None]
    return max(known, default=otherwise)


def _read_attempt(trajectory: ScoredTrajectory, members: Sequence[ScoredTrajectory]) -> _Attempt:
    """Returns the attempt as it was played; calls that overlap are one wave."""
    firsts = [each.turns[0].prompt_ids for each in members if each.turns]
    shared = len(os.path.commonprefix(firsts)) if len(firsts) > 1 else 0
    ended, waves, waits = 0.0, list[list[PlayedCall]](), list[tuple[float, float]]()
    for (begin, end), turn in sorted(zip(trajectory.spans, trajectory.turns, strict=True), key=lambda each: each[0]):
        sizes = {"kept": turn.kept, "prompt": len(turn.prompt_ids), "sampled": len(turn.sampled_ids)}
        if not waves or begin >= ended:
            waits.append((trajectory.started_at + ended, begin - ended))
            waves.append([])
        waves[-1].append(PlayedCall(wait_s=0.0, shared=0 if len(waves) > 1 else shared, **sizes))
        ended = max(ended, end)
    waits.append((trajectory.started_at + ended, max(trajectory.duration_s - ended, 0.0)))
    spans = np.array(trajectory.spans, np.float64).reshape(-1, 2) + trajectory.started_at
    first = trajectory.turns[0].prompt_ids if trajectory.turns else []
    cached = 0 if trajectory.id == members[0].id else shared
    return _Attempt(Play(tuple(map(tuple, waves))), first, cached, spans[spans[:, 0].argsort()], waits)


def _without_queue(attempts: Sequence[_Attempt], agents: int) -> tuple[float, Iterator[Play]]:
    """Returns how long a call holds up the others of its agent process, and the attempts with waits without that.

    One that computes takes as much longer as others are at work when it begins; one that waits for a tool does not.
    """
    waits = np.array([wait for each in attempts for wait in each.waits])  # [wait, 2]
    begins, ends = np.sort(waits[:, 0]), np.sort(waits.sum(axis=1))
    at_work = np.searchsorted(begins, waits[:, 0], "right") - np.searchsorted(ends, waits[:, 0], "right")
    queue = np.maximum(at_work, 1) / agents
    varied = queue - queue.mean()
    agent_s = max(float(varied @ waits[:, 1]) / max(float(varied @ varied), 1e-9), 0.0)
    left = map(float, np.maximum(waits[:, 1] - agent_s * queue, 0.0))
    return agent_s, (
        Play(tuple((calls[0]._replace(wait_s=next(left)), *calls[1:]) for calls in each.play.waves), next(left))
        for each in attempts
    )


def _work(groups: Sequence[Sequence[_Attempt]], common: int, replicas: int) -> Floats:
    """Returns [call, 5]: its seconds, and of what its replica did meanwhile prompt tokens, passes, sequences, calls."""
    rows = []
    for number, members in enumerate(groups):
        for each in members:
            calls = [call for wave in each.play.waves for call in wave]
            cached = max(each.cached, common if number else 0)
            rows += [(call.prompt - (0 if place else cached), call.sampled) for place, call in enumerate(calls)]
    prompts, sampled = np.array(rows, np.float64).T
    begin, end = np.concatenate([each.spans for members in groups for each in members]).T
    others = [_meanwhile(begin, end, amount) / replicas for amount in (prompts, sampled, np.ones(len(end)))]
    return np.stack([end - begin, others[0], sampled, others[1], others[2]], axis=1)


def _meanwhile(begin: Floats, end: Floats, amount: Floats) -> Floats:
    """Returns for each call how much of all amounts fell into its time, if each is spread evenly over its call."""
    slopes = amount / np.maximum(end - begin, 1e-6)
    times = np.concatenate([begin, np.maximum(end, begin + 1e-6)])
    order = times.argsort()
    rate = np.cumsum(np.concatenate([slopes, -slopes])[order])
    done = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(times[order]))])
    before, after = (np.interp(at, times[order], done) for at in (begin, end))
    change: Floats = after - before
    return change


def non_negative(matrix: Floats, values: Floats) -> list[float]:
    """Returns the least squares without negative coefficients, by leaving out the most negative ones one by one."""
    columns, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while columns:
        solved = np.linalg.lstsq(matrix[:, columns], values, rcond=None)[0]
        if solved.min() >= 0:
            found[columns] = solved
            break
        del columns[int(solved.argmin())]
    return [float(each) for each in found]
