"""Contract 6: a run killed at any instant and started again ends as an undisturbed one, and loses nothing."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.loop.owed_groups import group
from art_cli.loop.stage_policy import PolicySource, open_learner
from art_cli.loop.train import train
from art_cli.runs.history import read_history
from art_cli.runs.manifest import digest_of, read_manifest, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from tests.support.paths import LETTERS
from tests.support.processes import forked

ADAPTER = "adapter_model.safetensors"
STEPS = 6
# Kills at random instants; few by default, many to find rare bugs.
KILLS = int(os.environ.get("ART_TEST_KILLS", "6"))
# One rollout at a time, so that what is sampled does not depend on which others happened to share a forward pass.
SETTINGS = [f"train.steps={STEPS}", "train.keep_checkpoints=99", "rollout.concurrency=1", "eval=null"]


class Trainer:
    """Starts training processes and kills them. Output goes to `log_path`."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path

    def start(self, overrides: list[str]) -> forked.Forked:
        with self.log_path.open("ab") as log:
            return forked.Forked(["train", LETTERS / "config.yaml", *overrides], stdout=log, stderr=log)

    def kill(self, child: forked.Forked) -> None:
        child.kill()
        assert child.wait(timeout=30) == -signal.SIGKILL


def status_of(child: forked.Forked, timeout_s: float) -> int | None:
    """How it ended; None when it has not within that time."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer.log")


def finished_lines(root: Path) -> set[str]:
    """The ids of every trajectory that stands whole on disk."""
    return {t.id for step in range(STEPS) for t in RunDir(root).trajectories(step)}


def wait_for_work(child: forked.Forked, root: Path) -> None:
    """Waits until the run finishes another attempt or ends."""
    before = finished_lines(root)
    while finished_lines(root) == before and status_of(child, 0.01) is None:
        pass


def retrain(root: Path, step: int) -> bytes:
    """The adapter that step gives, computed again from the checkpoint before it and the step's scored groups."""
    files = RunDir(root)
    loaded = load_config(LETTERS / "config.yaml", [f"runs={root.parent}", *SETTINGS])
    with open_learner(loaded, PolicySource(files.checkpoint_path(step), step)) as learner:
        groups = group(files.scored(step))
        learner.step([groups[name] for name in sorted(groups)])
        again = root.parent / f"again-{step}"
        again.mkdir()
        learner.save(again)
    return (again / ADAPTER).read_bytes()


def check_record(root: Path) -> None:
    """Every step done once: all attempts played and scored once, all checkpoints complete."""
    files = RunDir(root)
    assert [line.step for line in files.metrics() if line.split == "train"] == list(range(STEPS))
    for step in range(STEPS):
        played = files.trajectories(step)
        assert len({t.id for t in played}) == len(played) == 12, f"step {step}"
        scored: dict[str, list[ScoredTrajectory]] = group(files.scored(step))
        assert {t.id for members in scored.values() for t in members} == {t.id for t in played}
        assert verify_checkpoint(files.checkpoint_path(step + 1)).step == step + 1
        assert sorted(line.id for line in files.learned(step)) == sorted(t.id for t in played)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_random_instants_loses_nothing_and_trains_on_nothing_twice(
    tmp_path: Path, trainer: Trainer
) -> None:
    """Kills come 0.3 to 1.5 s after each start or after a finished attempt, during loading, sampling, judging, training
    or writing.

    After every kill each trajectory that stood on disk still stands there at the end. Each step's adapter is, bit for
    bit, what one update of the checkpoint before it on that step's scored groups gives: no group counted twice or not
    at all. Runs that finish early are followed by fresh ones until there have been KILLS kills.
    """
    draw, settings = random.Random(7), [f"runs={tmp_path}", *SETTINGS]
    root, seen, kills, num_hit = tmp_path / "letters", set[str](), 0, 0
    begin = time.monotonic()
    while True:
        child = trainer.start(settings)
        if kills < KILLS and kills % 2:
            wait_for_work(child, root)
        status = status_of(child, draw.uniform(0.3, 1.5) if kills < KILLS else 300)
        if status is None:
            trainer.kill(child)
            kills += 1
            seen |= finished_lines(root)
            num_hit += bool(finished_lines(root))
        elif kills < KILLS:
            assert status == 0
            check_record(root)
            root.rename(tmp_path / f"finished-{kills}")
            seen = set()
        else:
            assert status == 0, trainer.log_path.read_text()[-2000:]
            break
        assert time.monotonic() - begin < 800
    assert seen <= finished_lines(root) and num_hit > 0
    check_record(root)
    for step in range(STEPS):
        assert retrain(root, step) == (RunDir(root).checkpoint_path(step + 1) / ADAPTER).read_bytes(), f"step {step}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_outside_of_generation_give_a_bit_identical_adapter(tmp_path: Path, trainer: Trainer) -> None:
    """Killed right after every second step's last trajectory was written: during judging, training or checkpointing.

    The undisturbed run is given the same trajectories and does the rest in one go: judging, training, checkpoints.
    """
    draw, settings = random.Random(3), [f"runs={tmp_path}", *SETTINGS]
    files = RunDir(tmp_path / "letters")
    for step in range(0, STEPS, 2):
        child = trainer.start(settings)
        while len(files.trajectories(step)) < 12:
            assert status_of(child, 0.002) is None
        assert status_of(child, draw.uniform(0.0, 0.05)) is None
        trainer.kill(child)
    assert status_of(trainer.start(settings), 300) == 0
    check_record(files.root)

    whole = RunDir(tmp_path / "whole" / "letters")
    shutil.copytree(files.root, whole.root)
    for step in range(STEPS):
        shutil.rmtree(whole.checkpoint_path(step + 1))
        whole.scored_path(step).unlink()
        whole.learned_path(step).unlink()
    asyncio.run(train(load_config(LETTERS / "config.yaml", [f"runs={tmp_path / 'whole'}", *SETTINGS])))
    for step in range(STEPS + 1):
        one, other = (run.checkpoint_path(step) / ADAPTER for run in (whole, files))
        assert one.read_bytes() == other.read_bytes(), f"step {step}"
    for step in range(STEPS):
        assert whole.learned_path(step).read_bytes() == files.learned_path(step).read_bytes(), f"step {step}"


@pytest.mark.slow
def test_an_older_checkpoint_takes_over_when_the_newest_is_damaged_and_the_steps_come_out_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is trained again from its existing trajectories, with equal bytes.

    Later damaged checkpoints are set aside, so the new checkpoint is the newest.
    """
    overrides = [f"runs={tmp_path}", "train.keep_checkpoints=1", "eval=null"]
    loaded = load_config(LETTERS / "config.yaml", [*overrides, "train.keep_checkpoints=9"])
    root = asyncio.run(train(loaded)).root
    path = RunDir(root).checkpoint_path(4) / ADAPTER
    good = path.read_bytes()
    loaded = load_config(LETTERS / "config.yaml", overrides)
    shutil.copytree(RunDir(root).checkpoint_path(4), RunDir(root).checkpoint_path(5))
    played: list[Trajectory] = RunDir(root).trajectories(3)
    learned = RunDir(root).learned_path(3).read_bytes()
    path.write_bytes(good[:-7])
    RunDir(root).learned_path(3).unlink()
    asyncio.run(train(loaded))
    assert "passed over a checkpoint" in caplog.text
    assert path.read_bytes() == good
    assert RunDir(root).checkpoint_steps() == [0, 4]
    assert (path.parent.with_name("step_0005.damaged") / ADAPTER).read_bytes() == good
    assert RunDir(root).learned_path(3).read_bytes() == learned
    assert RunDir(root).trajectories(3) == played


@pytest.mark.slow
def test_what_a_lost_policy_played_is_not_trained_on_and_its_evaluation_is_done_again(tmp_path: Path) -> None:
    """The newest checkpoints are lost and the learning rate is different, so later steps differ."""
    settings = [f"runs={tmp_path}", "train.steps=3", "train.keep_checkpoints=9", "eval.every=1"]
    asyncio.run(train(load_config(LETTERS / "config.yaml", settings)))
    files = RunDir(tmp_path / "letters")
    lost = {step: digest_of(read_manifest(files.checkpoint_path(step))) for step in (2, 3)}
    for step in (2, 3):
        shutil.rmtree(files.checkpoint_path(step))
    asyncio.run(train(load_config(LETTERS / "config.yaml", [*settings, "train.learning_rate=2e-2"])))
    made = {step: digest_of(read_manifest(files.checkpoint_path(step))) for step in (1, 2, 3)}
    assert made[2] != lost[2] and made[3] != lost[3]
    for step in (1, 2):
        used = [
            turn.policy for members in group(files.scored(step)).values() for each in members for turn in each.turns
        ]
        assert used and {*used} == {made[step]}, f"step {step}"
    evaluated = {line.step: line.policy for line in files.metrics() if line.split == "eval"}
    assert [evaluated[step] for step in (1, 2, 3)] == [made[step] for step in (1, 2, 3)]
    assert [each.number for each in read_history(files).updates] == [1, 2, 3]
