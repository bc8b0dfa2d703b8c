"""Batches: plays and judges each step's groups, as far ahead as the policy allows; StepGroups: a step's groups.

    allow(step) -> plays what the step owes, judges meanwhile, writes trajectories.jsonl and scored.jsonl -> take(step)

A batch begins once it is allowed and the previous batch has started all its rollouts. Its early groups then fill the
slots that the previous batch's slow rollouts leave free. The loop never allows a step more than `train.max_staleness`
ahead of the sampling policy. Attempts of unused batches stay on disk and are not played again.

A step plays its groups in waves, because groups without signal are refilled (DAPO, section 3.2):

    wave 1 = the step's own groups; wave 2 = one additional group per group without signal in wave 1; and so on

The step stops when `rollout.groups_per_step` groups have signal, or when `rollout.refill` allows no further group.
Waves follow from the step's files alone, so a run killed in the middle of a wave resumes with the same groups.
"""

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from statistics import fmean
from typing import NamedTuple

import msgspec

from art_cli.config.metric_names import JUDGED_BY
from art_cli.config.schema import RunConfig
from art_cli.config.sections.rollout_config import RolloutConfig
from art_cli.judges import Judge
from art_cli.judges.cascade import cascade_numbers
from art_cli.judges.costs import Usage
from art_cli.judges.reliability import is_left_out, reliability_numbers, with_reliability
from art_cli.judges.shadow_judges import ShadowJudges, shadow_numbers
from art_cli.learners.algorithms.credit import rewards_of
from art_cli.loop.evaluate import values_by_scenario
from art_cli.loop.owed_groups import GroupPlace, GroupScorer, group, owed, plan_places
from art_cli.loop.policy_sampler import Sampler
from art_cli.loop.source_mix import SourceMix
from art_cli.rollouts.rollout_runner import Progress, RolloutPlan, shown
from art_cli.runs.durable import LineWriter
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Trajectory, has_signal
from art_cli.runtime.errors import RunError
from art_cli.runtime.threads import end

log = logging.getLogger(__name__)

Scored = Mapping[str, Sequence[ScoredTrajectory]]  # group id -> the group, for all scored groups

MAX_POOLS = 16  # number of pools whose mean reward is a metric of the step, most common pools first
MAX_KINDS = 5  # number of failure kinds and model names that the metrics list, most common first
CLOSE_TIMEOUT_S = 60.0  # longest wait for cancelled rollouts and verdicts to finish


class StepGroups:
    """A step's groups in playing order.

    `own` lists the places of the step's own groups, `spare` the places for refills. Each source refills only groups of
    that source. `done` are the step's finished trajectories. Groups with finished trajectories keep their scenario and
    source, even if the scenarios have changed since. Groups beyond `spare` are ignored: `art plan` may have played them
    when the step was larger.
    """

    def __init__(
        self,
        config: RolloutConfig,
        step: int,
        own: Sequence[GroupPlace],
        spare: Sequence[GroupPlace],
        done: Sequence[Trajectory],
    ) -> None:
        self._config, self._num_own = config, len(own)
        self._plans: dict[str, list[RolloutPlan]] = {}  # group id -> its rollouts, in order
        begun = {each.group_id: GroupPlace(each.source or "", each.scenario) for each in reversed(done)}
        for plan in plan_places([*own, *spare], step=step, group_size=config.group_size):
            if (place := begun.get(plan.group_id)) is not None:
                plan = msgspec.structs.replace(plan, source=place.source, scenario=place.scenario)
            self._plans.setdefault(plan.group_id, []).append(plan)
        self._names = list(self._plans)
        self.done = [each for each in done if each.group_id in self._plans]
        self._begun: set[str] = set()
        self._lines = [
            _Line(
                [name for name, plans in self._plans.items() if plans[0].source == source],
                sum(place.source == source for place in own),
                begun.keys(),
            )
            for source in config.by_source
        ]

    def next(self, scored: Scored) -> list[RolloutPlan]:
        """Returns the rollouts of the next wave; [] if the step is complete.

        Unscored groups count as groups without signal and are refilled from their own source. Groups from an earlier
        start belong to the first wave, so finished trajectories survive a judge that changes its verdict.
        """
        wave = {name for line in self._lines for name in line.next(scored)}
        self._begun |= wave
        return [plan for name in self._names if name in wave for plan in self._plans[name]]

    def scored(self, scored: Scored) -> list[list[ScoredTrajectory]]:
        """Returns the scored groups to train on, in the planned order."""
        return [list(scored[name]) for name in self._names if name in self._begun and name in scored]

    def numbers(self, scored: Scored) -> dict[str, float]:
        """Returns the means of the rollouts' metrics over the step's own groups.

        Refills are excluded. They continue until enough groups have signal, which would bias the means.
        """
        own = set(self._names[: self._num_own])
        numbers = {
            f"metrics.{name}": sum(values.values()) / len(values)
            for name, values in values_by_scenario([t for t in self.done if t.group_id in own]).items()
            if name not in ("reward", "failed")
        }
        groups = [scored[name] for name in self._names[: self._num_own] if name in scored]
        for source, part in self._config.by_source.items():
            its = [members for members in groups if (members[0].source or "") == source]
            if part.pool is not None:
                numbers |= _pool_numbers(its, part.pool, f"pool.{source}." if source else "pool.")
            if source:
                numbers |= _source_numbers(its, source)
        if self._config.num_spare:
            numbers |= {"num_refilled": len(self._begun) - self._num_own} | _reward_numbers(groups)
        return numbers


class _Line:
    """A source's groups within a step, in order: `wanted` own groups, then refills."""

    def __init__(self, names: Sequence[str], wanted: int, begun_before: Set[str]) -> None:
        self._names, self._wanted, self._num = names, wanted, 0  # number of groups begun
        self._num_begun_before = max((n for n, name in enumerate(names, 1) if name in begun_before), default=0)

    def next(self, scored: Scored) -> Sequence[str]:
        """Returns the next wave: one group for each group with signal that is still missing."""
        missing = self._wanted - sum(name in scored and _tells(scored[name]) for name in self._names[: self._num])
        first, self._num = self._num, min(len(self._names), max(self._num + missing, self._num_begun_before))
        return self._names[first : self._num]


def _tells(group: Sequence[ScoredTrajectory]) -> bool:
    return has_signal(rewards_of(group)) and not is_left_out(group)


def _source_numbers(groups: Sequence[Sequence[ScoredTrajectory]], source: str) -> dict[str, float]:
    """Returns a source's metrics, with the source's name in each key. Rewards need at least one scored attempt."""
    numbers: dict[str, float] = {"num_groups": len(groups)}
    numbers["num_failed"] = sum(each.error is not None for members in groups for each in members)
    if found := _reward_numbers(groups):
        numbers |= {"reward": found["reward_mean"], "no_signal_share": found["no_signal_share"]}
    return {f"{name}.{source}": value for name, value in numbers.items()}


def _pool_numbers(groups: Sequence[Sequence[ScoredTrajectory]], key: str, prefix: str) -> dict[str, float]:
    """Returns the mean reward of each pool, for the MAX_POOLS most common pools."""
    rewards: dict[str, list[float]] = {}
    for members in groups:
        rewards.setdefault(str(members[0].scenario.get(key)), []).extend(rewards_of(members))
    common = sorted((pool for pool in rewards if rewards[pool]), key=lambda pool: -len(rewards[pool]))[:MAX_POOLS]
    names = {pool: re.sub(r"\W", "_", pool)[:40] for pool in common}
    return {f"{prefix}{names[pool]}": math.fsum(rewards[pool]) / len(rewards[pool]) for pool in common}


def _reward_numbers(groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
    """Returns the rewards' mean and deviation and the share of groups without signal; {} without rewards."""
    rewards = [reward for group in groups for reward in rewards_of(group)]
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        "no_signal_share": 1 - sum(map(_tells, groups)) / len(groups),
    }


class Batch(NamedTuple):
    """A step's training data: scored groups in planned order, and its metrics so far."""

    groups: list[list[ScoredTrajectory]]
    metrics: dict[str, float]


class _PlayedStep(NamedTuple):
    step: int
    groups: StepGroups
    scorer: GroupScorer
    played_now: list[Trajectory]  # without earlier starts, whose seconds are unknown
    sample_s: float
    judge_s: float  # judging time after the last rollout


class Batches:
    """A run's batches, all played by the same sampler. `close` cancels unfinished batches, which stay owed."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        sampler: Sampler,
        judge: Judge,
        mix: SourceMix,
        *,
        shadows: ShadowJudges | None = None,
        arrange: Callable[[list[RolloutPlan]], list[RolloutPlan]] = list,
    ) -> None:
        """`arrange` comes from the learner, which may assign a prompt to each rollout."""
        self._shadows, self._arrange = shadows, arrange
        self.config, self.run, self.sampler, self.judge = config, run, sampler, judge
        self.mix = mix
        self._tasks: dict[int, asyncio.Task[Batch]] = {}
        self._progress: dict[int, Progress] = {}
        self._is_concurrency_shown = False
        self._usage: Usage | None = None  # the judge's usage after the previous batch

    def allow(self, step: int) -> None:
        """Starts the batch of `step`. Steps are allowed in order; steps already begun or past the end are ignored."""
        if step >= self.config.train.steps or step in self._tasks:
            return
        self._usage = self._usage or self.judge.usage
        self._progress[step] = Progress(f"step {step + 1}/{self.config.train.steps}")
        self._tasks[step] = asyncio.create_task(self._make(step))

    async def take(self, step: int) -> Batch:
        """Waits for the batch and shows its progress. Raises errors of playing and judging."""
        async with shown(self._progress[step]):
            batch = await self._tasks.pop(step)
        del self._progress[step]
        return batch

    async def close(self) -> None:
        await end(*self._tasks.values(), timeout_s=CLOSE_TIMEOUT_S)

    async def _make(self, step: int) -> Batch:
        if (before := self._progress.get(step - 1)) is not None:
            await before.is_handed_out.wait()
        played = await self._play(step)
        groups = played.groups.scored(played.scorer.scored)
        await asyncio.to_thread(self.mix.note, step, groups)
        trained = await asyncio.to_thread(with_reliability, groups)
        return Batch(trained, self._numbers(played, groups, trained) | self._judged())

    def _is_played_again(self, trajectory: Trajectory, scored: Scored) -> bool:
        is_owed = trajectory.group_id not in scored and self.judge.of([trajectory]).lacks_value(trajectory)
        return is_owed or self.sampler.is_replaced(trajectory)

    async def _play(self, step: int) -> _PlayedStep:
        """Plays and judges what the step still owes, in waves, and appends to the step's files."""
        with LineWriter(self.run.trajectories_path(step)) as lines, LineWriter(self.run.scored_path(step)) as out:
            own, spare = await asyncio.to_thread(self.mix.places, step)
            scored = group(each for each in self.run.scored(step) if not self.sampler.is_replaced(each))
            done = [each for each in self.run.trajectories(step) if not self._is_played_again(each, scored)]
            groups = StepGroups(self.config.rollout, step, own, spare, done)
            scorer = GroupScorer(self.judge, out, self._shadows, scored)
            for trajectory in groups.done:
                scorer.add(trajectory)
            played_now = list[Trajectory]()

            async def keep(trajectory: Trajectory) -> None:
                await asyncio.to_thread(lines.append, trajectory)  # on disk before it is counted
                groups.done.append(trajectory)
                played_now.append(trajectory)
                scorer.add(trajectory)

            sample_s = judge_s = 0.0
            try:
                while plans := groups.next(scorer.scored):
                    begin = time.perf_counter()
                    await self.sampler.play(self._arrange(owed(plans, groups.done)), keep, self._progress[step])
                    sampled = time.perf_counter()
                    await scorer.finish()
                    sample_s, judge_s = sample_s + sampled - begin, judge_s + time.perf_counter() - sampled
                    _check_scored(scorer, step)
            finally:
                scorer.cancel()
        return _PlayedStep(step, groups, scorer, played_now, sample_s, judge_s)

    def _numbers(
        self, played: _PlayedStep, groups: list[list[ScoredTrajectory]], trained: list[list[ScoredTrajectory]]
    ) -> dict[str, float]:
        """Returns the step's metrics, without the judge's cost."""
        numbers = _rollout_numbers(played) | self._concurrency() | {"settled_share": settled_share(groups)}
        if self.config.learner.trains_weights:  # a prompt learner always samples with the weights of step 0
            numbers |= _staleness(played.groups.done, played.step)
        numbers |= shadow_numbers(groups, self.config) | cascade_numbers(groups, self.config) | _models_returned(groups)
        if self.config.learner.trains_weights:  # a prompt learner ignores reliability
            numbers |= reliability_numbers(trained)
        return numbers | played.groups.numbers(played.scorer.scored)

    def _concurrency(self) -> dict[str, float]:
        """Returns the concurrency that the runner chose; logs it once."""
        if (concurrency := self.sampler.runner.concurrency) is None:
            return {}
        if not self._is_concurrency_shown:
            self._is_concurrency_shown = True
            log.info("rollout.concurrency: auto is %s", concurrency)
        return {"rollouts_at_once": concurrency.number}

    def _judged(self) -> dict[str, float]:
        """Returns the cost of the judge's calls since the previous batch, without "judge_usd" if a price is unknown."""
        before, now = self._usage, self.judge.usage
        self._usage = now
        if before is None or now.calls == before.calls:
            return {}
        numbers: dict[str, float] = {
            "judge_calls": now.calls - before.calls,
            "judge_tokens": now.tokens - before.tokens,
        }
        if now.cost_usd is not None and before.cost_usd is not None:
            numbers["judge_usd"] = now.cost_usd - before.cost_usd
        return numbers


def _check_scored(scorer: GroupScorer, step: int) -> None:
    """Raises RunError if more groups are unscored than scored. A few unscored groups do not stop the step."""
    if scorer.progress.stopped or len(scorer.progress.owed) > len(scorer.scored):
        reason = scorer.progress.stopped or next(iter(scorer.progress.owed.values()))
        raise RunError(
            f"step {step + 1}: {len(scorer.progress.owed)} groups could not be judged ({reason}); "
            "nothing is lost: repair the judge or rollout and run the same command again"
        )


def _rollout_numbers(played: _PlayedStep) -> dict[str, float]:
    """Returns counts and means over the step's rollouts. Endpoints without tokens report their own counts.

    `truncated_share` is the share of replies that hit their length limit. `num_limited` counts rollouts that hit a turn
    or context limit, `num_policy_failed` the policy's own failures, `num_without_turns` successful rollouts without a
    model call, `failed.KIND` failures. `failing_share` is the share of scenarios of which at least half of the rollouts
    failed.
    """
    rollouts = played.groups.done
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    numbers = {
        "sample_s": played.sample_s,
        "judge_s": played.judge_s,
        "num_unscored": len(played.scorer.progress.owed),
        "tokens_sampled": _num_tokens(rollouts),
        "turns": sum(len(each.turns) or round(each.metrics.get("num_turns", 0)) for each in rollouts),
        "num_without_turns": sum(each.is_silent and each.error is None for each in rollouts),
        "truncated_share": sum(turn.finish_reason == "length" for turn in turns) / max(len(turns), 1),
        "num_limited": sum(each.limit is not None for each in rollouts),
        "num_policy_failed": sum(bool(each.failure) for each in rollouts),
        "failing_share": fmean(map(_is_failing, group(rollouts).values())) if rollouts else 0.0,
    }
    if played.played_now and played.sample_s:
        numbers["sample_tokens_per_s"] = _num_tokens(played.played_now) / played.sample_s
    kinds = [each.error.partition(":")[0] for each in rollouts if each.error is not None]
    failures = Counter(re.sub(r"\W", "_", kind, flags=re.ASCII)[:40] for kind in kinds)
    return numbers | {f"failed.{kind}": num for kind, num in failures.most_common(MAX_KINDS)}


def _is_failing(attempts: Sequence[Trajectory]) -> bool:
    return 2 * sum(each.error is not None for each in attempts) >= len(attempts)


def settled_share(groups: Sequence[Sequence[ScoredTrajectory]]) -> float:
    """Returns the share of groups whose attempts sampled the same tokens, for less than the step's best reward."""
    best, num = max((reward for members in groups for reward in rewards_of(members)), default=0.0), 0
    for members in groups:
        sampled = {tuple(tuple(turn.sampled_ids) for turn in each.turns) for each in members}
        is_same = len(members) > 1 and len(sampled) == 1 and any(sampled.pop())
        num += is_same and max(rewards_of(members), default=best) < best - EQUAL_REWARDS
    return num / max(len(groups), 1)


def _models_returned(groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, float]:
    """Counts scores by the model that the reply named: judged_by.NAME, most common names first."""
    scores = (score for members in groups for each in members for score in (*each.scores, *each.shadow))
    names = (name for score in scores if score.model_returned for name in score.model_returned.split(", "))
    return {f"{JUDGED_BY}{name}": num for name, num in Counter(names).most_common(MAX_KINDS)}


def _num_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(each.num_sampled or round(each.metrics.get("num_completion", 0)) for each in trajectories)


def _staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """Returns the mean (over tokens) and maximum number of steps between the sampling policy and the trained policy."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tokens = sum(len(turn.sampled_ids) for turn in turns)
    return {
        "staleness": sum((step - turn.step) * len(turn.sampled_ids) for turn in turns) / max(tokens, 1),
        "staleness_max": max((step - turn.step for turn in turns), default=0),
    }
