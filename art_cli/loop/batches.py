"""Batches: each step's scored groups, played and judged as far ahead as the policy allows.

    allow(step) -> plays what the step owes, judges meanwhile, writes trajectories.jsonl and scored.jsonl -> take(step)

A batch begins when it is allowed and the one before has handed out all its rollouts: its first groups start in the
places that the others' long tails leave free. How far ahead is the loop's to say: it never allows a step further than
`train.max_staleness` from the policy that samples. What is played and not taken stays on disk and is not owed again.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from art_cli.config.schema import RunConfig
from art_cli.errors import RunError
from art_cli.judges import Judge
from art_cli.loop.evaluate import values_by_scenario
from art_cli.loop.generate import GroupScorer, group, owed, plan_groups
from art_cli.loop.sampler import Sampler
from art_cli.rollouts.progress import Progress, shown
from art_cli.rollouts.scenarios import ScenarioOrder
from art_cli.run_dir import LineWriter, RunDir
from art_cli.trajectory import Json, ScoredTrajectory, Trajectory

MAX_KINDS = 5  # kinds of failure counted one by one in a step's metrics, the commonest
CLOSE_TIMEOUT_S = 60.0  # for rollouts and verdicts that are broken off


class Batch(NamedTuple):
    """What a step trains on: its scored groups in the order of the plan, and what playing and judging them took."""

    groups: list[list[ScoredTrajectory]]
    metrics: dict[str, float]


class Batches:
    """The batches of one run, played by one sampler. Close it: what is being played is broken off and stays owed."""

    def __init__(
        self, config: RunConfig, run: RunDir, sampler: Sampler, judge: Judge, scenarios: Sequence[Json]
    ) -> None:
        self.config, self.run, self.sampler, self.judge, self.scenarios = config, run, sampler, judge, scenarios
        ids = [str(scenario["id"]) for scenario in scenarios]
        self.order = ScenarioOrder(ids, seed=config.train.seed, shuffle=config.rollout.shuffle)
        self._tasks: dict[int, asyncio.Task[Batch]] = {}
        self._progress: dict[int, Progress] = {}

    def allow(self, step: int) -> None:
        """The batch of `step` may be played from now on. Steps are allowed in order, each once; past the last: none."""
        if step >= self.config.train.steps:
            return
        self._progress[step] = Progress(f"step {step + 1}/{self.config.train.steps}")
        self._tasks[step] = asyncio.create_task(self._make(step))

    async def take(self, step: int) -> Batch:
        """The batch, shown while it is waited for. Raises what playing and judging it raised."""
        async with shown(self._progress[step]):
            batch = await self._tasks.pop(step)
        del self._progress[step]
        return batch

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # seen: the run has ended for another reason

    async def _make(self, step: int) -> Batch:
        if (before := self._progress.get(step - 1)) is not None:
            await before.is_handed_out.wait()
        chosen = self.order.groups(step, self.config.rollout.groups_per_step)
        plans = plan_groups([self.scenarios[i] for i in chosen], step=step, group_size=self.config.rollout.group_size)
        done = self.run.trajectories(step)
        scored = group(self.run.scored(step))
        with LineWriter(self.run.trajectories_path(step)) as played, LineWriter(self.run.scored_path(step)) as out:
            scorer = GroupScorer(self.judge, out, scored)
            for trajectory in done:
                scorer.add(trajectory)

            async def keep(trajectory: Trajectory) -> None:
                await asyncio.to_thread(played.append, trajectory)  # on disk before it is counted
                done.append(trajectory)
                scorer.add(trajectory)

            begin = time.perf_counter()
            try:
                await self.sampler.play(owed(plans, done), keep, self._progress[step])
                sample_s = time.perf_counter() - begin
                await scorer.finish()
            finally:
                scorer.cancel()
            judge_s = time.perf_counter() - begin - sample_s
        _check_scored(scorer, step)
        names = dict.fromkeys(plan.group_id for plan in plans)
        groups = [scorer.scored[name] for name in names if name in scorer.scored]
        return Batch(groups, _numbers(done, step, sample_s, judge_s, len(scorer.progress.owed)))


def _check_scored(scorer: GroupScorer, step: int) -> None:
    """A step goes on without groups the judge gave up on, but not without most of them. Raises RunError."""
    if scorer.progress.stopped or len(scorer.progress.owed) > len(scorer.scored):
        reason = scorer.progress.stopped or next(iter(scorer.progress.owed.values()))
        raise RunError(
            f"step {step + 1}: {len(scorer.progress.owed)} groups could not be judged ({reason}); "
            "nothing is lost: mend the judge and run the same command again"
        )


def _numbers(
    trajectories: Sequence[Trajectory], step: int, sample_s: float, judge_s: float, num_unscored: int
) -> dict[str, float]:
    """Counts and means of a step's rollouts; `judge_s` is the part of judging that rollouts did not hide.

    `num_limited` rollouts ran into a limit on turns or context; `num_without_turns` finished without a model call;
    `failed.KIND` of them failed in that way.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    numbers = {
        "sample_s": sample_s,
        "judge_s": judge_s,
        "num_unscored": num_unscored,
        "tokens_sampled": tokens,
        "turns": len(turns),
        "staleness": sum((step - turn.step) * len(turn.sampled_ids) for turn in turns) / max(tokens, 1),
        "staleness_max": max((step - turn.step for turn in turns), default=0),
    }
    numbers["sample_tokens_per_s"] = tokens / sample_s if sample_s else 0.0
    numbers["num_without_turns"] = sum(trajectory.is_silent and trajectory.error is None for trajectory in trajectories)
    numbers["num_limited"] = sum(trajectory.limit is not None for trajectory in trajectories)
    numbers |= {f"failed.{kind}": num for kind, num in _failures(trajectories).most_common(MAX_KINDS)}
    for name, values in values_by_scenario(trajectories).items():
        if name not in ("reward", "failed"):
            numbers[f"metrics.{name}"] = sum(values.values()) / len(values)
    return numbers


def _failures(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """How many failed by each kind of error, in letters that the name of a metric may have."""
    kinds = [trajectory.error.partition(":")[0] for trajectory in trajectories if trajectory.error is not None]
    return Counter(re.sub(r"\W", "_", kind, flags=re.ASCII)[:40] for kind in kinds)
