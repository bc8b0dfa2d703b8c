"""Batches ahead of the learner: bounded staleness, and sampling during updates."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.judges import make_judge
from art_cli.learners import Learner, Progress, StepMetrics, make_learner
from art_cli.loop import open_run
from art_cli.loop.batches import Batches
from art_cli.loop.policy_sampler import Sampler
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.train import train
from art_cli.models.weights import clone_trainable
from art_cli.rollouts.rollout_runner import OnFinished, RolloutPlan
from art_cli.rollouts.rollout_runner import Progress as Counts
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import LearnerError, UsageError
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS

STALE = ("loss.off_policy.name=truncate", "train.learning_rate=1e-2", "eval=null", "train.keep_checkpoints=9")
DEADLINE_S = 60.0


def letters(runs: Path, *overrides: str) -> LoadedConfig:
    return load_config(LETTERS / "config.yaml", [f"runs={runs}", *STALE, *overrides])


class WatchedLearner:
    """A learner that does `first` before each step."""

    def __init__(self, learner: Learner, first: Callable[[int], None]) -> None:
        self._learner, self._first, self._num = learner, first, 0

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        self._first(self._num)
        self._num += 1
        return self._learner.step(groups, progress=progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


def train_watched(loaded: LoadedConfig, first: Callable[[int], None]) -> RunDir:
    def make(*arguments: Any, **knobs: Any) -> WatchedLearner:
        return WatchedLearner(make_learner(*arguments, **knobs), first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_run, "make_learner", make)
        return RunDir(asyncio.run(train(loaded)).root)


def check_staleness(files: RunDir, staleness: int) -> None:
    """Step N trains on tokens of steps N - K to N. The engine's own weights are proved at every load (contract 5)."""
    for step in range(4):
        played = files.trajectories(step)
        assert len({trajectory.id for trajectory in played}) == len(played) == 12
        assert all(step - staleness <= turn.step <= step for t in played for turn in t.turns)
    lines = [line.metrics for line in files.metrics() if line.split == "train"]
    assert len(lines) == 4
    assert max(line["staleness_max"] for line in lines) >= 1
    assert all(line["probe_gap"] < 1e-5 for line in lines)


@pytest.mark.slow
def test_no_token_is_staler_than_two_steps_and_the_engine_follows(tmp_path: Path) -> None:
    check_staleness(RunDir(asyncio.run(train(letters(tmp_path, "train.max_staleness=2"))).root), 2)


@pytest.mark.slow
def test_the_next_batch_is_sampled_while_the_learner_works(tmp_path: Path) -> None:
    """The learner's first step waits for trajectories of step 1; on-policy they could never come.

    No token is staler than the one step that is allowed.
    """
    loaded = letters(tmp_path, "train.max_staleness=1")
    path = RunDir(loaded.config.runs / loaded.config.name).trajectories_path(1)

    def wait_for_the_next_batch(number: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while number == 0 and not (path.exists() and path.stat().st_size):
            assert time.monotonic() < deadline, "step 1 was not played while step 0 was trained"
            time.sleep(0.01)

    files = train_watched(loaded, wait_for_the_next_batch)
    assert files.checkpoint_steps()[-1] == 4
    check_staleness(files, 1)


@pytest.mark.slow
def test_what_was_played_ahead_is_not_played_again(tmp_path: Path) -> None:
    """The learner fails in step 1, when trajectories of step 2 lie on disk; the next start keeps every line of them."""
    loaded = letters(tmp_path, "train.max_staleness=1")
    ahead = RunDir(loaded.config.runs / loaded.config.name).trajectories_path(2)

    def fail(number: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while number == 1 and not (ahead.exists() and ahead.read_bytes().endswith(b"\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if number == 1:
            raise LearnerError("made to fail")

    with pytest.raises(LearnerError, match="made to fail"):
        train_watched(loaded, fail)
    before = ahead.read_bytes()
    assert before
    files = RunDir(asyncio.run(train(loaded)).root)
    assert ahead.read_bytes().startswith(before)
    assert len({trajectory.id for trajectory in files.trajectories(2)}) == len(files.trajectories(2)) == 12


class HeldSampler:
    """Plays nothing; hands out and ends when told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.progress: list[Counts] = []
        self.may_end = asyncio.Event()
        self.runner = SimpleNamespace(concurrency=None)

    async def play(self, plans: Sequence[RolloutPlan], on_finished: OnFinished, progress: Counts) -> None:
        self.begun.append(plans[0].step)
        self.progress.append(progress)
        for plan in plans:
            fields = {name: getattr(plan, name) for name in ("group_id", "group_size", "index", "step", "scenario")}
            result = on_finished(Trajectory(id=plan.trajectory_id, returned_reward=1.0, **fields))
            assert result is not None
            await result
        await self.may_end.wait()


async def test_a_batch_begins_when_the_one_before_has_handed_out_its_rollouts(tmp_path: Path) -> None:
    loaded, sampler = letters(tmp_path), HeldSampler()
    scenarios = load_scenarios(loaded.config.rollout.scenarios, loaded.directory)
    run, judge = RunDir(tmp_path / "run"), make_judge(loaded.config.judge, loaded.directory)
    batches = Batches(loaded.config, run, cast(Sampler, sampler), judge, SourceMix(loaded.config, run, {"": scenarios}))
    for step in range(3):
        batches.allow(step)
    for step in range(3):
        async with asyncio.timeout(DEADLINE_S):
            while len(sampler.progress) <= step:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sampler.begun == list(range(step + 1))
        sampler.progress[step].is_handed_out.set()
    sampler.may_end.set()
    batch = await batches.take(0)
    assert [len(group) for group in batch.groups] == [4, 4, 4]
    await batches.close()


def test_a_twin_shares_the_base_and_moves_alone() -> None:
    weights = tiny_weights()
    other = clone_trainable(weights)
    pairs = list(zip(weights.model.parameters(), other.model.parameters(), strict=True))
    assert all((mine is theirs) == (not mine.requires_grad) for mine, theirs in pairs)
    trained = [(mine, theirs) for mine, theirs in pairs if mine.requires_grad]
    assert trained and all(mine.equal(theirs) for mine, theirs in trained)
    trained[0][0].data.add_(1.0)
    assert not trained[0][0].equal(trained[0][1])
    with weights.lock:
        assert other.lock.acquire(timeout=1)  # each its own


def test_stale_tokens_need_importance_weights() -> None:
    with pytest.raises(UsageError, match=r"train\.max_staleness.*loss\.off_policy"):
        load_config(LETTERS / "config.yaml", ["train.max_staleness=1"])
