"""reasoning-gym as an environment: its puzzle, its scorer, one turn."""

from pathlib import Path
from typing import Any

import pytest

from art_cli.rollouts.environments import Settings, open_environment
from art_cli.rollouts.environments.reasoning_gym import ReasoningGym, read_answer
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.trajectory import Trajectory
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import ScriptedBackend


async def played(stage: Stage, environment: Any, *seeds: int, **options: Any) -> list[Trajectory]:
    """Plays one attempt per seed, sequentially, and returns the trajectories."""
    common: dict[str, Any] = {"group_id": "g", "group_size": 1, "index": 0, "step": 0}
    plans = [
        RolloutPlan(trajectory_id=f"t{seed}", scenario={"id": str(seed), "seed": seed}, **common) for seed in seeds
    ]
    config = {"entry": None, "scenarios": None, "environment": environment, "processes": 0, "concurrency": 1}
    async with stage.open(**config | options) as runner:
        await runner.run(plans, stage.finished.append)
    return stage.finished


@pytest.mark.slow
async def test_a_right_answer_gets_the_full_score_of_the_generators_own_puzzle(tmp_path: Path) -> None:
    """The reference is the library's own dataset of that seed, its answer and its scorer. A child process plays."""
    import reasoning_gym

    args = {"min_terms": 2, "max_terms": 3}
    entry = reasoning_gym.create_dataset("chain_sum", seed=17, size=1, **args)[0]
    replies = iter([f"<think>hm</think>So <answer> {entry['answer']} </answer>.", "nothing"])
    stage = Stage(tmp_path, ScriptedBackend(lambda request: next(replies)))
    environment = {"name": "reasoning_gym/chain_sum", "args": args, "system": "Be brief."}
    right, wrong = await played(stage, environment, 17, 18, processes=1)
    assert right.error is None and len(right.turns) == 1
    assert [message["content"] for message in right.messages[:2]] == ["Be brief.", entry["question"]]
    assert (right.returned_reward, right.metrics["solved"]) == (1.0, 1.0)
    assert (wrong.returned_reward, wrong.metrics["solved"]) == (0.0, 0.0)


async def test_an_answer_that_makes_the_scorer_fail_gets_nothing_and_is_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ScriptedBackend(lambda request: "two times three"))
    (attempt,) = await played(stage, "reasoning_gym/prime_factorization", 1)
    assert (attempt.error, attempt.returned_reward, attempt.metrics["malformed"]) == (None, 0.0, 1.0)


async def test_a_scenario_without_a_seed_is_a_failed_attempt(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.open(entry=None, environment={"name": "reasoning_gym/chain_sum"}, processes=0) as runner:
        await runner.run(stage.plans(1), stage.finished.append)
    assert stage.finished[0].error == ('EnvironmentFault: the scenario has no "seed", a whole number from 0 on')


def test_a_seed_is_the_same_puzzle_whenever_it_is_drawn() -> None:
    first, second = (open_environment(Settings("reasoning_gym/word_sorting")) for _ in range(2))
    entries = [[each.entry(seed)[1] for seed in order] for each, order in ((first, (1, 2)), (second, (2, 1)))]  # type: ignore[attr-defined]
    assert entries[0] == entries[1][::-1] and entries[0][0]["question"] != entries[0][1]["question"]


def test_all_generators_are_listed_with_one_line_each() -> None:
    listed = list(ReasoningGym().listed())
    assert len(listed) == 105 and all(each.about and "\n" not in each.about for each in listed)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("7", "7"),
        ("<think>8</think> 7", "7"),
        ("<answer>1</answer> no, <answer>\n2\n</answer>", "2"),
        ("<think><answer>1</answer></think>2", "2"),
        ("</answer> 3", "</answer> 3"),
    ],
)
def test_the_last_tagged_answer_is_read(reply: str, answer: str) -> None:
    assert read_answer(reply) == answer
