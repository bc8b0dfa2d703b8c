"""Tasksets of the real verifiers package in a separate Python: one turn, several turns, tools, and two roles.

verifiers takes seconds to import, so the tasksets in tests/clients/verifiers share a few processes.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_cli.rollouts import bootstrap as start
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.trajectory import Trajectory
from tests.support.others.real_verifiers import MARKS, PYTHON
from tests.support.paths import CLIENTS
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import Answer, ScriptedBackend, tool_call

pytestmark = MARKS

TASKSETS = CLIENTS / "verifiers"


async def played(name: str, seeds: list[int], *answers: Answer, **args: Any) -> list[Trajectory]:
    """Plays these tasks sequentially."""
    said: Iterator[Answer] = iter(answers)
    stage = Stage(TASKSETS, ScriptedBackend(lambda request: next(said)))
    common: dict[str, Any] = {"group_id": "g", "group_size": 1, "index": 0, "step": 0}
    plans = [
        RolloutPlan(trajectory_id=f"t{seed}", scenario={"id": f"seed-{seed}", "seed": seed}, **common) for seed in seeds
    ]
    environment = {"name": f"verifiers/{name}", "args": args}
    options = {"python": PYTHON, "processes": 1, "concurrency": 1, "max_turns": 3, "timeout_s": 200}
    async with stage.open(entry=None, environment=environment, **options) as runner:
        await runner.run(plans, stage.finished.append)
    return stage.finished


def roles(trajectory: Trajectory) -> list[str]:
    return [str(message["role"]) for message in trajectory.messages]


async def test_tasks_are_scenarios_and_parts_of_the_reward_are_metrics() -> None:
    """Task n asks for n + n: a correct answer scores 1, a short answer a half. A missing task is the environment's
    fault.
    """
    right, wrong, absent = await played("sums_v1", [2, 1, 7], "4", "It is surely 3.", taskset={"num_tasks": 3})
    assert (right.error, right.returned_reward) == (None, 1.5)
    assert right.metrics.items() >= {"right": 1.0, "short": 1.0, "turns": 1.0}.items()
    assert (wrong.returned_reward, wrong.metrics["right"], wrong.metrics["short"]) == (0.0, 0.0, 0.0)
    assert [message["content"] for message in right.messages] == ["Add.", "What is 2 + 2?", "4"]
    assert absent.error is not None and "set rollout.environment.size to 3" in absent.error


async def test_an_environment_of_several_turns_is_one_sequence_and_ends_at_its_own_limit_or_ours() -> None:
    found, ended = await played("guess_v1", [0, 1], "3", "7", "1", "2", "3", "4")
    assert (found.error, found.returned_reward, roles(found)) == (None, 1.0, ["user", "assistant"] * 2)
    assert found.metrics["num_branches"] == 0  # each prompt continues all previous tokens
    assert (ended.error, ended.limit, len(ended.turns)) == (None, "turn_limit", 3)


async def test_a_task_brings_tools_and_a_wrong_call_is_told() -> None:
    calls = [tool_call("desk_add", a=17, b=25), tool_call("desk_sub")]
    (trajectory,) = await played("desk_v1", [0], *calls, "It is 42.")
    assert (trajectory.error, trajectory.returned_reward) == (None, 1.0)
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["desk_add"]
    told = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert told == ["42", "unknown tool 'desk_sub'; known: desk_add"]
    assert trajectory.metrics["num_branches"] == 0


async def test_of_two_roles_one_is_recorded_and_trained() -> None:
    """verifiers' own user simulation: the same policy plays the user, whose words are not its turns."""
    answers = ["What is nothing twice?", "It is 0.", "###DONE###"]
    (trajectory,) = await played("sums_v1", [0], *answers, id="user-sim", trained="assistant")
    assert trajectory.error is None and trajectory.metrics["right"] == 1.0
    assert [message["content"] for message in trajectory.messages] == ["Add.", answers[0], answers[1]]


REFUSALS: list[tuple[str, dict[str, Any], int, str]] = [
    ("nothing_here", {}, 1, "taskset 'nothing_here' not found"),
    ("sums_v1", {"agnet": {}}, 1, "agnet"),
    ("sums_v1", {"taskset": {"num_task": 3}}, 1, "num_task"),
    ("sums_v1", {"trained": "user"}, 1, "no role 'user'; one of agent"),
    ("sums_v1", {"id": "user-sim"}, 1, "several roles; one of assistant, user"),
    ("sums_v1", {}, 9, "set rollout.environment.size to 5"),
]


def test_what_cannot_be_played_is_refused_in_words_and_what_is_installed_is_listed() -> None:
    """In one process, because the import takes long."""
    cases = json.dumps([case[:3] for case in REFUSALS])
    command = [PYTHON, TASKSETS / "refusals.py", Path(start.__file__).parent, cases, TASKSETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    told, (library,) = json.loads(done.stdout.splitlines()[-1])
    for words, (*_, expected) in zip(told, REFUSALS, strict=True):
        assert expected in words
    problems = {each["name"]: each["problem"] for each in library["environments"]}
    assert problems["verifiers/harbor"] == "" and "nltk" in problems["verifiers/textarena"]
