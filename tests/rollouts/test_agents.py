"""Agents of openai 3, the OpenAI Agents SDK and pydantic-ai, each in its own Python, are recorded and trained."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_cli.chat.requests import Request
from art_cli.checkpoints import import_start
from art_cli.run_dir import RunDir
from art_cli.trajectory import Trajectory
from tests.support.paths import CLIENTS
from tests.support.real_agents import MARKS, PYTHON
from tests.support.scripted import ScriptedBackend
from tests.support.stage import Stage
from tests.support.tool_clients import ANSWER, CALL, demo, teach

pytestmark = MARKS

PLACE = CLIENTS / "agents"
AGENTS = {"plain.py": "openai", "sdk.py": "agents", "sdk_responses.py": "agents", "pydantic_agent.py": "pydantic_ai"}
Json = dict[str, Any]


def answer(request: Request) -> Any:
    assert request.messages is not None
    return ANSWER if request.messages[-1]["role"] == "tool" else CALL


async def rehearse(agent: str, place: Path) -> tuple[Trajectory, Json]:
    """One attempt of the agent against a scripted policy that is always right, and the transcript to teach."""
    backend = ScriptedBackend(answer)
    shutil.copytree(PLACE, place)
    source = (PLACE / agent).read_text()
    (trajectory,) = await Stage(place, backend).play(source, python=PYTHON, timeout_s=120)
    return trajectory, demo(trajectory.tools)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with one checkpoint, which was taught to call the tool as each of the agents shows it."""
    place = tmp_path_factory.mktemp("taught")
    demos = [asyncio.run(rehearse(agent, tmp_path_factory.mktemp("rehearsal") / "place"))[1] for agent in AGENTS]
    return teach(place, list({json.dumps(each, sort_keys=True): each for each in demos}.values()))


@pytest.mark.parametrize("agent", AGENTS)
async def test_every_call_of_an_agent_with_its_own_packages_is_recorded(tmp_path: Path, agent: str) -> None:
    trajectory, _ = await rehearse(agent, tmp_path / "place")
    assert trajectory.error is None
    told = trajectory.metadata
    assert (told["called"], told["text"], told["torch"]) == ([["add", {"a": 2, "b": 3}]], ANSWER, False)
    assert told["python"] == str(PYTHON) and told[AGENTS[agent]]
    assert trajectory.returned_reward == 1.0
    assert [turn.finish_reason for turn in trajectory.turns] == ["tool_calls", "stop"]
    assert [message["role"] for message in trajectory.messages][-4:] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_with_its_own_packages_is_trained(taught: RunDir, tmp_path: Path, agent: str) -> None:
    """Two steps on the embedded engine, from the policy that was taught to call the tool."""
    project = taught.root.parent
    runs = tmp_path / "runs"
    run = RunDir(runs / "adder")
    import_start(taught.checkpoint_path(0), run.root)
    settings = [f"rollout.entry={PLACE / agent}:rollout", f"rollout.python={PYTHON}", f"runs={runs}", "train.steps=2"]
    settings += ["rollout.group_size=4", "rollout.groups_per_step=1", "rollout.sampling.max_tokens=80", "sft=null"]
    command = [sys.executable, "-m", "art_cli", "train", str(project / "config.yaml"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run.checkpoint_steps()[-1] == 2
    played = [
        json.loads(line)
        for path in sorted(run.root.glob("step_*/trajectories.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(played) == 8
    good = [each for each in played if not each.get("error")]
    assert len(good) >= 6, [each.get("error") for each in played]
    for each in good:
        assert each["metadata"]["python"] == str(PYTHON)
        assert all(len(turn["sampled_ids"]) == len(turn["logprobs"]) > 0 for turn in each["turns"])
    right = [each for each in good if each["metadata"]["called"] == [["add", {"a": 2, "b": 3}]]]
    assert len(right) >= 4, [each["metadata"] for each in good]
    assert all(len(each["turns"]) >= 2 and each["tools"] for each in right)
