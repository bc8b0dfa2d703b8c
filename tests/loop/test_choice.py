"""A step's scenarios, chosen from the run's files: writing, reading, and the same choice after resuming."""

import asyncio
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import RunConfig
from art_cli.loop.scenario_choice import ScenarioChoice
from art_cli.loop.train import train
from art_cli.rollouts.adaptive import expected_signal
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import GroupRewards, Json, Trajectory, score_trajectory
from art_cli.runtime.errors import ConfigError, DataError
from tests.support.paths import LETTERS

SCENARIOS: list[Json] = [{"id": str(number), "level": number % 3} for number in range(12)]


def config(*overrides: str) -> RunConfig:
    return load_config(LETTERS / "config.yaml", list(overrides)).config


def played(step: int, scenario: Json, rewards: list[float | None]) -> list[Trajectory]:
    fields = {"group_id": f"s{step:04d}-g{scenario['id']}", "group_size": len(rewards), "step": step}
    return [
        score_trajectory(Trajectory(id=f"{step}-{index}", index=index, scenario=scenario, **fields), reward)
        for index, reward in enumerate(rewards)
    ]


def test_what_a_step_notes_decides_the_later_ones_and_a_restart_chooses_the_same(tmp_path: Path) -> None:
    """Eight steps with everything solved but scenario 7, which half of the attempts solve."""
    settings = config("rollout.choose=adaptive", "rollout.refill=1.0")
    run = RunDir(tmp_path)
    going = ScenarioChoice(settings, run, SCENARIOS)
    chosen = []
    for step in range(8):
        chosen.append(going.scenarios(step))
        assert chosen[-1] == ScenarioChoice(settings, run, SCENARIOS).scenarios(step)
        rewards: list[list[float | None]] = [[0.0, 1.0, 1.0, 0.0] if s["id"] == "7" else [1.0] * 4 for s in SCENARIOS]
        going.note(step, [played(step, s, r) for s, r in zip(SCENARIOS, rewards, strict=True)])
    assert [len(each) for each in chosen] == [6] * 8
    found = going._adaptive.probabilities(expected_signal(going.history(8), step=8, half_life=8))
    seen = sum(2 ** (-age / 8) for age in range(1, 9))
    one, other = (2 / 6 + seen) / (2 + 3 * seen), 2 / 6 / (2 + 3 * seen)
    assert found[7] == pytest.approx(0.9 * one / (one + 11 * other) + 0.1 / 12)
    assert found[7] > 0.5


def test_what_is_written_are_the_rewards_of_each_group_and_its_pool(tmp_path: Path) -> None:
    choice = ScenarioChoice(config("rollout.choose=adaptive", "rollout.pool=level"), RunDir(tmp_path), SCENARIOS)
    choice.note(4, [played(4, SCENARIOS[5], [0.5, None, 1.0])])
    assert RunDir(tmp_path).group_rewards(4) == [
        GroupRewards(group_id="s0004-g5", scenario="5", pool="2", rewards=[0.5, 1.0])
    ]


@pytest.mark.parametrize("staleness", [0, 2])
def test_only_steps_that_are_certainly_done_count(tmp_path: Path, staleness: int) -> None:
    """Step 5 with max_staleness 2 may begin when step 2 is trained: it knows steps 0 to 2."""
    settings = config(
        "rollout.choose=adaptive",
        "loss.off_policy.name=truncate",
        *([f"train.max_staleness={staleness}"] if staleness else []),
    )
    choice = ScenarioChoice(settings, RunDir(tmp_path), SCENARIOS)
    for step in range(5):
        choice.note(step, [played(step, SCENARIOS[0], [0.0, 1.0])])
    known = choice.history(5)
    assert [step for step, groups in known.items() if groups] == list(range(5 - staleness))


def test_epochs_write_nothing(tmp_path: Path) -> None:
    choice = ScenarioChoice(config(), RunDir(tmp_path), SCENARIOS)
    choice.note(0, [played(0, SCENARIOS[0], [0.0, 1.0])])
    assert not list(tmp_path.iterdir())


def test_a_scenario_without_the_pools_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="scenario '0': 'colour', which rollout.pool names, is missing"):
        ScenarioChoice(config("rollout.pool=colour"), RunDir(tmp_path), SCENARIOS)


def test_shuffle_has_no_effect_on_adaptive_choice_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.shuffle.*'epochs' only"):
        config("rollout.choose=adaptive", "rollout.shuffle=false")


@pytest.mark.slow
def test_a_run_that_chooses_by_its_own_past_is_resumed_to_the_same_choices(tmp_path: Path) -> None:
    """Two steps, then two more in a second start, against four in one go by what their files say."""
    settings = ["eval=null", "rollout.choose=adaptive", "rollout.refill=0.5", "rollout.concurrency=1"]
    for steps in (2, 4):
        loaded = load_config(LETTERS / "config.yaml", [f"runs={tmp_path}", f"train.steps={steps}", *settings])
        run = RunDir(asyncio.run(train(loaded)).root)
    known: list[Json] = [{"id": f"letters-{number}", "ask": f"say {number} letters"} for number in range(1, 6)]
    for step in range(4):
        chosen = [str(s["id"]) for s in ScenarioChoice(loaded.config, run, known).scenarios(step)]
        groups = run.group_rewards(step)
        assert [group.scenario for group in groups] == chosen[: len(groups)]
        assert len(groups) >= 3
    assert all("num_refilled" in line.metrics for line in run.metrics() if line.split == "train")
