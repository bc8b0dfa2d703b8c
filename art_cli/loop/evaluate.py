"""Plays the evaluation scenarios and compares policies: means, bootstrap intervals, paired differences.

Every attempt at a scenario counts. A failed attempt has reward 0 in the comparison, because an agent that crashes has
not done its job, and is counted separately.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.schema import EvalConfig
from art_cli.judges.costs import Price
from art_cli.loop.owed_groups import owed, plan_groups
from art_cli.loop.policy_sampler import Sampler
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.trajectory import Json, Trajectory

RESAMPLES = 2000  # bootstrap: the ends of a 95 % interval move by about 1 % of its width between seeds


class Estimate(NamedTuple):
    """A mean over scenarios with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    num: int  # scenarios


async def play_evaluation(
    sampler: Sampler,
    config: EvalConfig,
    scenarios: Sequence[Json],
    *,
    step: int,
    path: Path,
    title: str,
    watch: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Returns the evaluation's trajectories. Those in `path` are not played again; new ones are appended there.

    `watch` is called with each new one after it is written. An exception of it ends the evaluation.
    """
    plans = plan_groups(scenarios, step=step, group_size=config.attempts, prefix="e", temperature=config.temperature)
    done = list(read_lines(path, Trajectory))
    missing = owed(plans, done)
    if missing:
        with LineWriter(path) as writer:

            def keep(trajectory: Trajectory) -> None:
                writer.append(trajectory)
                done.append(trajectory)
                if watch is not None:
                    watch(trajectory)

            await sampler.play_shown(missing, keep, title=title)
    return done


def values_by_scenario(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """metric -> scenario id -> mean over its attempts; "reward" and "failed" besides the rollout's own metrics.

    There is no "reward" if attempts finished and none returned one, because failures alone would make it 0.
    """
    finished = [trajectory for trajectory in trajectories if trajectory.error is None]
    has_reward = not finished or any(trajectory.returned_reward is not None for trajectory in finished)
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        scenario = str(trajectory.scenario.get("id", trajectory.group_id))
        failed = trajectory.error is not None
        seen["failed"][scenario].append(float(failed))
        if has_reward and (failed or trajectory.returned_reward is not None):
            seen["reward"][scenario].append(0.0 if failed else trajectory.returned_reward or 0.0)
        for name, value in trajectory.metrics.items():
            seen[name][scenario].append(value)
    return _means(seen)


def _means(seen: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    return {
        metric: {scenario: sum(values) / len(values) for scenario, values in rows.items()}
        for metric, rows in seen.items()
    }


def spent_by_scenario(trajectories: Sequence[Trajectory], price: Price | None) -> dict[str, dict[str, float]]:
    """Returns the cost of an attempt as `values_by_scenario` does: "seconds", "tokens_in", "tokens_out", "cost_usd".

    Tokens are summed over all calls; each call's prompt counts whole. There is no "cost_usd" without a price.
    """
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        scenario = str(trajectory.scenario.get("id", trajectory.group_id))
        tokens_in = sum(turn.kept + len(turn.prompt_ids) for turn in trajectory.turns)
        tokens_in += round(trajectory.metrics.get("num_prompt", 0))
        tokens_out = trajectory.num_sampled + round(trajectory.metrics.get("num_completion", 0))
        spent = {"seconds": trajectory.duration_s, "tokens_in": float(tokens_in), "tokens_out": float(tokens_out)}
        if price is not None:
            spent["cost_usd"] = price.cost(tokens_in, tokens_out)
        for name, value in spent.items():
            seen[name][scenario].append(value)
    return _means(seen)


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Returns the mean and percentile bootstrap interval (Efron 1979) over scenarios.

    A single value is its own interval.
    """
    assert values, "no values to estimate from"
    draw = random.Random(seed)
    size = len(values)
    means = sorted(sum(draw.choices(values, k=size)) / size for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return Estimate(sum(values) / size, low, high, size)


def paired_difference(values: Mapping[str, float], baseline: Mapping[str, float], *, seed: int = 0) -> Estimate | None:
    """Returns the mean of value - baseline over the scenarios that both have; None if they share none."""
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[name] - baseline[name] for name in common], seed=seed) if common else None
