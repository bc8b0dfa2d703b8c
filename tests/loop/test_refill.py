"""Refilling groups without signal: which groups a step plays, whatever the judge says and wherever it is killed."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.compose import load_config
from art_cli.config.sections.rollout_config import RolloutConfig
from art_cli.judges import make_judge
from art_cli.loop.batches import Batch, Batches, StepGroups, settled_share
from art_cli.loop.owed_groups import GroupPlace
from art_cli.loop.policy_sampler import Sampler
from art_cli.loop.source_mix import SourceMix
from art_cli.rollouts.rollout_runner import OnFinished, Progress, RolloutPlan
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, score_trajectory
from tests.support.paths import LETTERS
from tests.support.records.attempts import scored

CONFIG = RolloutConfig(entry="none.py:none", scenarios="none", group_size=2, groups_per_step=4, refill=4.0)


def config(**values: float) -> RolloutConfig:
    return CONFIG.model_copy(update=values)


def step_groups(config: RolloutConfig, step: int, known: Sequence[Json], done: Sequence[Trajectory]) -> StepGroups:
    places = [GroupPlace("", scenario) for scenario in known]
    own, spare = places[: config.groups_per_step], places[config.groups_per_step :]
    return StepGroups(config, step, own, spare[: config.num_spare], done)


def play(plan: RolloutPlan) -> Trajectory:
    """Reward 0 and 1 at a scenario that tells; 0.5 for all attempts at another."""
    reward = float(plan.index % 2) if plan.scenario["tells"] else 0.5
    fields = {name: getattr(plan, name) for name in ("group_id", "group_size", "index", "step", "scenario")}
    return Trajectory(
        id=plan.trajectory_id, returned_reward=reward, metrics={"tells": plan.scenario["tells"]}, **fields
    )


def score(trajectories: Sequence[Trajectory]) -> dict[str, list[ScoredTrajectory]]:
    groups: dict[str, list[ScoredTrajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(score_trajectory(trajectory, trajectory.returned_reward))
    return groups


def shortest(tells: Sequence[bool], wanted: int) -> int:
    """Returns the length of the shortest prefix with `wanted` informative groups, or the full length."""
    return next((num for num in range(wanted, len(tells)) if sum(tells[:num]) >= wanted), len(tells))


def scenarios(tells: Sequence[bool]) -> list[Json]:
    return [{"id": str(number), "tells": int(value)} for number, value in enumerate(tells)]


@given(st.lists(st.booleans(), min_size=4, max_size=20), st.data())
def test_a_step_plays_the_shortest_beginning_with_enough_signal_also_after_kills(
    tells: list[bool], data: st.DataObject
) -> None:
    """Property: neither the waves nor where a start was killed change which groups the step has.

    A kill may leave any part of a wave; finished trajectories belong to the step.
    """
    finished: list[Trajectory] = []
    while True:
        groups, is_killed = step_groups(CONFIG, 3, scenarios(tells), finished), False
        while plans := groups.next(score(groups.done)):
            known = {trajectory.id for trajectory in groups.done}
            owed = [plan for plan in plans if plan.trajectory_id not in known]
            is_killed = bool(owed) and data.draw(st.booleans())
            done = data.draw(st.sets(st.sampled_from(range(len(owed))), max_size=len(owed))) if is_killed else set()
            groups.done += [play(plan) for place, plan in enumerate(owed) if not is_killed or place in done]
            if is_killed:
                finished = groups.done
                break
        if not is_killed:
            break
    played = groups.scored(score(groups.done))
    assert [members[0].scenario["id"] for members in played] == [str(n) for n in range(shortest(tells, 4))]
    assert {trajectory.id for trajectory in finished} <= {each.id for members in played for each in members}


def test_the_next_wave_is_as_large_as_what_is_missing() -> None:
    """4 wanted.

    Of wave 1, a single group has signal; wave 2 plays 3 groups, a single group has signal; wave 3 plays 2. The budget
    is 7.
    """
    tells = [False, True, False, False, True, False, False, False, False, True, True]
    groups, sizes = step_groups(CONFIG, 0, scenarios(tells), []), []
    while plans := groups.next(score(groups.done)):
        sizes.append(len(plans) // 2)
        groups.done += map(play, plans)
    assert sizes == [4, 3, 2, 2]
    assert [plan.trajectory_id for plan in plans] == []
    assert groups.numbers(score(groups.done))["num_refilled"] == 7


def test_the_numbers_are_those_of_the_steps_own_groups() -> None:
    """Own groups: one that tells (0, 1) and three at 0.5: mean 0.5, deviation sqrt(2 * 0.25 / 8) = 0.25, 3/4 silent.

    Of the refilled groups all tell; they change no mean.
    """
    groups = step_groups(CONFIG, 0, scenarios([True] + 3 * [False] + 4 * [True]), [])
    while plans := groups.next(score(groups.done)):
        groups.done += map(play, plans)
    numbers = groups.numbers(score(groups.done))
    assert numbers == {
        "metrics.tells": 0.25,
        "num_refilled": 3,
        "reward_mean": 0.5,
        "reward_std": pytest.approx(math.sqrt(2 * 0.25 / 8)),
        "no_signal_share": 0.75,
    }


def test_without_a_budget_nothing_is_refilled_and_no_number_is_added() -> None:
    groups = step_groups(config(refill=0.0), 0, scenarios(8 * [False]), [])
    groups.done += map(play, groups.next({}))
    assert groups.next(score(groups.done)) == []
    assert groups.numbers(score(groups.done)) == {"metrics.tells": 0.0}


def test_a_group_that_the_judge_left_unscored_is_refilled_and_kept_when_it_is_scored_later() -> None:
    """The second start scores it, so fewer groups would suffice; groups from the previous start still count."""
    tells = 8 * [True]
    first = step_groups(CONFIG, 0, scenarios(tells), [])
    first.done += map(play, first.next({}))
    scored = score(first.done)
    unscored = scored.pop("s0000-g0002")
    plans = first.next(scored)
    assert {plan.group_id for plan in plans} == {"s0000-g0004"}
    first.done += map(play, plans)
    assert first.next(score(first.done) | {"s0000-g0002": []}) == []
    again = step_groups(CONFIG, 0, scenarios(tells), first.done)
    assert len(again.next({})) == 10
    everything = score(first.done) | {"s0000-g0002": unscored}
    assert again.next(everything) == []
    assert len(again.scored(everything)) == 5


def test_a_begun_group_keeps_its_scenario_and_groups_beyond_the_plan_do_not_count() -> None:
    """The first start planned 8 groups and played half of the attempts; now there are 4 groups in a different order.

    So group 3 is finished at its old scenario, and group 6 counts neither as played nor as scored.
    """
    old, new = scenarios(8 * [True]), [{"id": f"new-{number}", "tells": 1} for number in range(8)]
    plans = step_groups(config(groups_per_step=8, refill=0.0), 0, old, []).next({})
    done = [play(plan) for plan in plans if plan.trajectory_id in ("s0000-g0003-a01", "s0000-g0006-a00")]
    groups = step_groups(config(refill=0.0), 0, new, done)
    wave = {plan.trajectory_id: plan.scenario["id"] for plan in groups.next({})}
    assert wave == {f"s0000-g000{n}-a0{a}": "3" if n == 3 else f"new-{n}" for n in range(4) for a in range(2)}
    assert [each.id for each in groups.done] == ["s0000-g0003-a01"]


@pytest.mark.parametrize(("refill", "num"), [(0.0, 0), (0.01, 1), (0.5, 2), (1.0, 4), (2.3, 10)])
def test_the_budget_is_rounded_up(refill: float, num: int) -> None:
    """4 * 0.01 = 0.04 -> 1 group; 4 * 2.3 = 9.2 -> 10."""
    assert config(refill=refill).num_spare == num


class Killed(Exception):
    pass


class DyingSampler:
    """Plays in order, without a model, and dies after `left` trajectories."""

    def __init__(self, left: int | None) -> None:
        self.left, self.played = left, list[str]()
        self.runner = SimpleNamespace(concurrency=None)

    def is_replaced(self, trajectory: Trajectory) -> bool:
        return False

    async def play(self, plans: Sequence[RolloutPlan], on_finished: OnFinished, progress: Progress) -> None:
        progress.is_handed_out.set()
        for plan in plans:
            if self.left == len(self.played):
                raise Killed
            result = on_finished(play(plan))
            assert result is not None
            await result
            self.played.append(plan.trajectory_id)


async def make_batch(root: Path, sampler: DyingSampler) -> Batch:
    """The batch of step 1, with 3 groups wanted and up to 6 more; of 24 scenarios every third one tells."""
    loaded = load_config(LETTERS / "config.yaml", ["rollout.refill=2.0"])
    run, judge = RunDir(root), make_judge(loaded.config.judge, loaded.directory)
    known = scenarios([number % 3 == 0 for number in range(24)])
    mix = SourceMix(loaded.config, run, {"": known})
    batches = Batches(loaded.config, run, cast(Sampler, sampler), judge, mix)
    batches.allow(1)
    try:
        return await batches.take(1)
    finally:
        await batches.close()


@pytest.mark.slow
def test_a_step_that_is_killed_after_any_trajectory_ends_with_the_same_groups(tmp_path: Path) -> None:
    """Contract 6 with waves: nothing finished is lost or played again, also when every start dies after 5 more."""
    whole = DyingSampler(None)
    expected = asyncio.run(make_batch(tmp_path / "whole", whole))
    assert expected.metrics["num_refilled"] > 0
    ids = [trajectory.id for members in expected.groups for trajectory in members]
    assert ids == whole.played
    for life in range(len(ids)):
        root = tmp_path / f"killed-{life}"
        dying, second = DyingSampler(life), DyingSampler(None)
        with pytest.raises(Killed):
            asyncio.run(make_batch(root, dying))
        again = asyncio.run(make_batch(root, second))
        assert dying.played + second.played == whole.played
        assert again.groups == expected.groups
        assert again.metrics["num_refilled"] == expected.metrics["num_refilled"]
    played: list[str] = []
    while len(played) < len(ids):
        sampler = DyingSampler(5)
        with contextlib.suppress(Killed):
            asyncio.run(make_batch(tmp_path / "often", sampler))
        played += sampler.played
    assert played == whole.played


def test_the_share_of_groups_that_settled_for_less() -> None:
    """The same tokens for 0.3, where another attempt earned 1; not other tokens, the best reward, or no tokens."""
    same = [scored("a", index, 0.3) for index in range(2)]
    [other] = [scored("a", 1, 0.3, turns=same[0].turns[:1])]
    best, silent = [scored("b", n, 1.0) for n in range(2)], [scored("c", n, 0.3, turns=[]) for n in range(2)]
    failed = [msgspec.structs.replace(scored("d", n, error="timeout: late"), reward=None, scores=[]) for n in range(2)]
    assert settled_share([same, best, silent, failed]) == 0.25
    assert settled_share([[same[0], other], best]) == settled_share([same]) == settled_share([]) == 0.0
