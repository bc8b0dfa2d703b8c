"""Codex's command line plays an attempt: its thoughts, its tools and its many messages are one sequence of tokens."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.rollouts.test_responses import assert_one_sequence, thinking
from tests.support.others.real_agents import CODEX, MARKS
from tests.support.paths import CLIENTS
from tests.support.processes.stage import Stage
from tests.support.standins.template_backend import THINKS, TemplateBackend, scripted

pytestmark = [*MARKS, pytest.mark.skipif(not CODEX.exists(), reason="no Codex in .venv-agents: make test-agents")]


def run(command: str) -> str:
    arguments = json.dumps({"cmd": command}, separators=(", ", ":  "))  # spaces that no client writes
    return f'<tool_call>\n{{"name": "exec_command", "arguments": {arguments}}}\n</tool_call>'


async def test_an_episode_of_codex_is_one_sequence(tmp_path: Path) -> None:
    """Three turns: two commands with thoughts, then the answer. The command outputs are real."""
    texts = [
        thinking("I look.") + run("ls"),
        thinking("I count.") + f"Now.\n{run('wc -l data.txt')}",
        "It has 3 lines.",
    ]
    backend = TemplateBackend(scripted(*texts), template=THINKS)
    shutil.copy(CLIENTS / "agents" / "codex.py", tmp_path)
    command = [sys.executable, "codex.py", str(CODEX)]
    (trajectory,) = await Stage(tmp_path, backend).play(entry=None, command=command, timeout_s=180)
    assert trajectory.error is None
    assert (trajectory.metadata["text"], trajectory.returned_reward) == ("It has 3 lines.", 1.0)
    assert [turn.sampled_ids for turn in trajectory.turns] == [backend.encode(f"{text}<|im_end|>") for text in texts]
    assert_one_sequence(trajectory.turns)
    outputs = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert "data.txt" in outputs[0] and "3 data.txt" in outputs[1]
    assert trajectory.metrics["num_branches"] == 0 and trajectory.branches == []
    assert "multi_agent_v1__spawn_agent" in [tool["function"]["name"] for tool in trajectory.tools]
